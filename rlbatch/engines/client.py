"""A rank's side of its engine host: starts it, calls it, notices its end, and ends it."""

from __future__ import annotations

import itertools
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlbatch.api import EngineLost, RolloutError
from rlbatch.engines.shared_names import private_folder, remove_leftovers
from rlbatch.engines.site import scrubbed, write_site
from rlbatch.engines.wire import Frame, Header, encode, read_frame
from rlbatch.launch.children import dies_with_parent, signal_group

LOG_LINES = 15
CLOSE_WAIT_S = 15.0
PING_S = 5.0
_RUN = "from rlbatch.engines.host import main; main()"


class EngineHost:
    """An engine in a process of its own. Start it on the main thread: the process gets SIGKILL when the thread that made it ends.

    Args:
        name: Of the rollout backend, for messages.
        engine: What it serves, ``module:Class``.
        folder: Of this engine's own: log and import path.
        python: Interpreter; empty: this one.
        variables: Environment variables beside the scrubbed ones of this process.
        entry_points: Entry-point group -> its lines, which the engine's interpreter shall see.
        sockets_variable: Environment variable that tells the engine where its sockets go: a folder that only this user may enter.
    """

    def __init__(
        self,
        name: str,
        engine: str,
        folder: Path,
        python: str = "",
        variables: Mapping[str, str] | None = None,
        entry_points: Mapping[str, Sequence[str]] | None = None,
        sockets_variable: str = "",
    ) -> None:
        remove_leftovers()
        self._name, self.log = name, folder / "engine.log"
        self._sockets = private_folder()
        places = {sockets_variable: str(self._sockets)} if sockets_variable else {}
        site = write_site(folder / "site", entry_points or {})
        ours, theirs = socket.socketpair()
        with theirs, self.log.open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    [python or sys.executable, "-c", _RUN, str(theirs.fileno()), engine],
                    env=scrubbed(os.environ, site, keep_path=not python) | places | dict(variables or {}),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=dies_with_parent(),
                )
            except OSError as error:
                ours.close()
                raise RolloutError(f"rollout.engine.python={python}: cannot be started ({error.strerror}). Name a Python.") from error
        self._socket, self._numbers = ours, itertools.count(1)
        self._calls: dict[int, queue.SimpleQueue[Frame | None]] = {}
        self._lock, self._is_gone = threading.Lock(), False
        threading.Thread(target=self._receive, daemon=True, name=f"{name}-engine").start()

    @property
    def pid(self) -> int:
        """Of the process; also the id of its group."""
        return self._process.pid

    def begin(self, operation: str, header: Header | None = None, payload: bytes = b"") -> Call:
        """Sends a call, whose answers may be awaited later.

        Raises:
            RolloutError: the engine is gone.
        """
        number, answers = next(self._numbers), queue.SimpleQueue[Frame | None]()
        with self._lock:
            self._calls[number] = answers
            if self._is_gone:
                answers.put(None)
        call = Call(self, operation, number, answers)
        self._send({**(header or {}), "id": number, "op": operation}, payload)
        return call

    def call(self, operation: str, header: Header | None = None, payload: bytes = b"", *, limit_s: float) -> dict[str, Any]:
        """Sends a call and waits for its end.

        Raises:
            RolloutError: it failed, took longer than ``limit_s`` seconds, or the engine is gone.
        """
        return self.begin(operation, header, payload).result(limit_s)

    def close(self) -> None:
        """Ends the process and all its children: asks, then SIGKILL."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        try:
            self._process.wait(CLOSE_WAIT_S)
        except subprocess.TimeoutExpired:
            signal_group(self.pid, signal.SIGKILL)
            self._process.wait()
        self._socket.close()
        shutil.rmtree(self._sockets, ignore_errors=True)
        remove_leftovers()

    def gone(self) -> EngineLost:
        """The error for a process that ended: why, and its last words."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(2.0)
        return EngineLost(f"rollout={self._name}: the engine's process {self._ending()}. {self.last_words()}")

    def last_words(self) -> str:
        """The last lines of the engine's log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return f"See {self.log}; its last lines:\n" + "\n".join(lines[-LOG_LINES:])

    def forget(self, number: int) -> None:
        """A call whose answers nobody awaits any more."""
        with self._lock:
            self._calls.pop(number, None)

    def cancel(self, number: int) -> None:
        """Asks the engine to give a call up."""
        with suppress(RolloutError):
            self._send({"op": "cancel", "of": number, "id": 0}, b"")

    def describe(self, operation: str) -> str:
        """A call, for messages."""
        return f"rollout={self._name}: `{operation}`"

    def _ending(self) -> str:
        code = self._process.returncode
        if code is None:
            return "closed its connection"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def _send(self, header: Header, payload: bytes) -> None:
        try:
            self._socket.sendall(encode(header, payload))
        except OSError as error:
            raise self.gone() from error

    def _receive(self) -> None:
        while frame := read_frame(self._socket):
            with self._lock:
                answers = self._calls.get(frame[0]["id"])
            if answers is not None:
                answers.put(frame)
        with self._lock:
            self._is_gone = True
            for answers in self._calls.values():
                answers.put(None)


class Call:
    """A call that the engine is working on."""

    def __init__(self, host: EngineHost, operation: str, number: int, answers: queue.SimpleQueue[Frame | None]) -> None:
        """Made by ``EngineHost.begin``."""
        self._host, self._operation, self._number, self._answers = host, operation, number, answers
        self._is_over = False

    def next(self, limit_s: float) -> Frame | None:
        """The next answer; None: none came within ``limit_s`` seconds.

        Raises:
            RolloutError: the call failed, or the engine is gone.
        """
        try:
            frame = self._answers.get(timeout=max(limit_s, 0.0))
        except queue.Empty:
            return None
        if frame is None:
            self._over()
            raise self._host.gone()
        if frame[0].get("end"):
            self._over()
            if "error" in frame[0]:
                raise RolloutError(f"{self._host.describe(self._operation)} failed: {frame[0]['error']}\n{self._host.last_words()}")
        return frame

    def result(self, limit_s: float) -> dict[str, Any]:
        """The header of the last answer.

        Raises:
            RolloutError: as ``next``, or it took longer than ``limit_s`` seconds.
        """
        deadline = time.monotonic() + limit_s
        while frame := self.next(deadline - time.monotonic()):
            if frame[0].get("end"):
                return frame[0]
        self.cancel()
        raise EngineLost(f"{self._host.describe(self._operation)} took longer than {limit_s:g} s. {self._host.last_words()}")

    def frames(self, hang_limit_s: float) -> Iterator[Frame]:
        """Answers up to the last one, while the engine lives: when none comes it is asked for a sign of life.

        Raises:
            RolloutError: as ``next``, or there was no sign of life for ``hang_limit_s`` seconds.
        """
        seen, ping = time.monotonic(), None
        while True:
            frame = self.next(min(PING_S, hang_limit_s / 4))
            if frame is not None:
                seen = time.monotonic()
                yield frame
                if self._is_over:
                    return
                continue
            ping = ping or self._host.begin("ping")
            if ping.next(0.0) is not None:
                seen, ping = time.monotonic(), None
            elif time.monotonic() - seen > hang_limit_s:
                raise EngineLost(
                    f"{self._host.describe(self._operation)}: no sign of life for {hang_limit_s:g} s. {self._host.last_words()}"
                )

    def cancel(self) -> None:
        """Gives the call up, unless it is over."""
        if not self._is_over:
            self._over()
            self._host.cancel(self._number)

    def _over(self) -> None:
        self._is_over = True
        self._host.forget(self._number)
