"""A rank's side of its engine host: starts it, calls it, notices when it is lost, and ends it."""

from __future__ import annotations

import itertools
import os
import queue
import resource
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from rlbatch.api import EngineLost, RolloutError
from rlbatch.api.secrets import LEAST_CHARACTERS, is_secret
from rlbatch.engines.client.caches import cache_variables
from rlbatch.engines.client.interpreter import PYTHON_HINT, engine_environment, write_site
from rlbatch.engines.client.liveness import IdleWatch, Liveness, Processes
from rlbatch.engines.protocol.frames import Frame, Header, encode, read_frame
from rlbatch.engines.protocol.shared_names import private_folder, remove_leftovers
from rlbatch.launch.ranks.children import MARK_VARIABLE, dies_with_parent
from rlbatch.launch.ranks.host_memory import none_left, oom_kills
from rlbatch.launch.records.disk import as_rollout_errors
from rlbatch.launch.shutdown import guardian

LINES, LINE_LENGTH, READ_BYTES = 15, 1000, 2**16


def log_tail(log: Path, variables: Mapping[str, str]) -> str:
    """The last lines of an engine's log.

    Args:
        log: The engine's log.
        variables: The engine's own. Values of those that are called a secret are shown as the variable's name.
    """
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - READ_BYTES))
            text = file.read(READ_BYTES).decode(errors="replace")
    except OSError as error:  # it is quoted in another error, which counts
        return f"Its log, {log}, cannot be read ({error.strerror})."
    secrets = {value: name for name, value in variables.items() if is_secret(name) and len(value) >= LEAST_CHARACTERS}
    for value in sorted(secrets, key=len, reverse=True):
        text = text.replace(value, f"${secrets[value]}")
    lines = [line if len(line) <= LINE_LENGTH else f"{line[:LINE_LENGTH]}..." for line in text.splitlines()[-LINES:]]
    return f"See {log}; its last lines:\n" + "\n".join(lines)


CLOSE_WAIT_S = 15.0
SEND_LIMIT_S = 20
"""Seconds that sending to a host may take: it reads at once what it is sent, unless it is stopped."""
PATIENCE = 4
"""Factor by which a call may take longer than any earlier one of its kind."""
_RUN = "from rlbatch.engines.host.server import main; main()"


class EngineHost:
    """An engine in a process of its own. Start it on the main thread: the process gets SIGKILL when the thread that made it ends.

    Args:
        name: Name of the rollout backend, for messages.
        engine: What it serves, ``module:Class``.
        folder: A folder of this engine's own, for log and import path.
        python: Interpreter; empty: this one.
        variables: Environment variables beside those of this process, see ``engine_environment``.
        entry_points: Entry-point group -> its lines, which the engine's interpreter shall see.
        sockets_variable: Environment variable that tells the engine where its sockets go: the folder of its temporary files, which only
            this user may enter.

    Attributes:
        log: The engine's.
        sockets: Folder that only this user may enter.
        processes: The engine's processes.
        hang_limit_s: Seconds without a sign of life after which it is lost, once it has started.
        lost: Why it is lost; None: it is not.
        outlasts: Whether its loss ends nothing now, see ``outlasting``.
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
        self._name, self.log, self._kills = name, folder / "engine.log", oom_kills()
        with as_rollout_errors("an engine cannot be started", folder), ExitStack() as made:
            self.sockets = private_folder()
            made.callback(shutil.rmtree, self.sockets, ignore_errors=True)
            site = write_site(folder / "site", entry_points or {})
            self.log.write_bytes(b"")
            log = self.log.open("ab")  # others add to it too
            made.pop_all()
        places = dict.fromkeys(["TMPDIR", *filter(None, [sockets_variable])], str(self.sockets))
        places |= cache_variables("", {})
        self._variables = engine_environment(os.environ, site, keep_path=not python) | places | dict(variables or {})
        self._variables[MARK_VARIABLE] = secrets.token_hex(8)
        ours, theirs = socket.socketpair()
        with theirs, log:
            try:
                self._process = subprocess.Popen(
                    [python or sys.executable, "-c", _RUN, str(theirs.fileno()), engine],
                    env=self._variables,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=dies_with_parent(),
                )
            except OSError as error:
                ours.close()
                raise RolloutError(f"rollout.engine.python={python}: cannot be started ({error.strerror}). {PYTHON_HINT}") from error
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_LIMIT_S, 0))
        self._socket, self._numbers = ours, itertools.count(1)
        self.processes, self.hang_limit_s = Processes(self.pid), float("inf")
        self.lost: EngineLost | None = None
        self.outlasts = False
        self._watch: IdleWatch | None = None
        self._durations: dict[str, float] = {}
        self._usual_durations: dict[str, float] = {}
        self._calls: dict[int, queue.SimpleQueue[Frame | None]] = {}
        self._lock, self._is_gone = threading.Lock(), False
        threading.Thread(target=self._receive, daemon=True, name=f"{name}-engine").start()

    @property
    def pid(self) -> int:
        """Id of the process, and of its group."""
        return self._process.pid

    def started(self, needed: Iterable[int], hang_limit_s: float) -> None:
        """The engine has started; from here on its end is noticed, and that of processes that it needs, whether something is awaited of it
        or not.
        """
        self.hang_limit_s = hang_limit_s
        self.processes.started(needed)
        self._watch = IdleWatch(self)

    def mark_warmed_up(self) -> None:
        """Calls of the kinds that have ended so far have compiled, allocated and looked up what they need; see ``busy_limit_s``."""
        self._usual_durations = dict(self._durations)

    def record_duration(self, operation: str, seconds: float) -> None:
        """Notes how long a call was awaited that ended well."""
        self._durations[operation] = max(seconds, self._durations.get(operation, 0.0))

    def busy_limit_s(self, operation: str, limit_s: float) -> float:
        """How long the engine may work on a call without an answer, which a GPU that waits for another for ever seems to do too:
        ``limit_s`` when its kind is not known, as it may compile then, or be a model's first.
        """
        if operation not in self._usual_durations:
            return limit_s
        return min(limit_s, max(self.hang_limit_s, PATIENCE * self._usual_durations[operation]))

    @contextmanager
    def outlasting(self) -> Iterator[None]:
        """Keeps the loss of the engine from ending anything in here: calls have an empty answer, and ``lost`` says why.

        For what ranks do together: one of them must not leave the others alone.
        """
        self.outlasts = True
        try:
            yield
        finally:
            self.outlasts = False

    def begin(self, operation: str, header: Header | None = None, payload: bytes = b"", *, after: Call | None = None) -> Call:
        """Sends a call, whose answers may be awaited later; it begins after another one, and fails if that does.

        Raises:
            EngineLost: the engine is lost.
        """
        number, answers = next(self._numbers), queue.SimpleQueue[Frame | None]()
        with self._lock:
            self._calls[number] = answers
            if self._is_gone:
                answers.put(None)
        call = Call(self, operation, number, answers)
        try:
            if self.lost:
                raise self.lost
            order = {} if after is None else {"after": after.number}
            self._send({**(header or {}), **order, "id": number, "op": operation}, payload)
        except EngineLost:
            if not self.outlasts:
                raise
        return call

    def call(self, operation: str, header: Header | None = None, payload: bytes = b"", *, limit_s: float) -> dict[str, Any]:
        """Sends a call and waits for its end.

        Raises:
            RolloutError: it failed.
            EngineLost: it took longer than ``limit_s`` seconds, or the engine is lost.
        """
        return self.begin(operation, header, payload).result(limit_s)

    def close(self, wait_s: float = CLOSE_WAIT_S) -> None:
        """Ends the process and all its children: asks, then after ``wait_s`` SIGKILL; for a lost one at once."""
        if self._watch:
            self._watch.end()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(0.0 if self.lost else wait_s)
        self.processes.kill(CLOSE_WAIT_S)
        self._process.wait()
        self._socket.close()
        shutil.rmtree(self.sockets, ignore_errors=True)
        remove_leftovers()

    def lose(self, reason: str) -> EngineLost:
        """The error for an engine that is lost from here on; the first reason counts."""
        if self.lost is None:
            self.lost = EngineLost(f"rollout={self._name}: {reason}{self._of_memory()}", self.log_tail())
        return self.lost

    def _of_memory(self) -> str:
        """What outgrew its plan, if the system has killed processes for want of memory since the engine was started; else empty."""
        if oom_kills() <= self._kills:
            return ""
        own, ended = (1024 * resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        why = guardian.explained(guardian.told(), own, max(self.processes.most_bytes, ended)).rstrip(".")
        return f", killed by the system: {none_left()}{', ' if why else ''}{why}"

    def gone(self) -> EngineLost:
        """The error for a process that ended: why, and its last words."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(2.0)
        return self.lose(f"the engine's process {self._ending()}")

    def check(self, operation: str = "") -> None:
        """Looks whether the engine's processes live; ``operation`` is the call that is awaited, if any.

        Raises:
            EngineLost: the host has ended, or a process that the engine needs; others may hold its end of the connection.
        """
        if self._process.poll() is not None:
            raise self.gone()
        if self.processes.is_broken():
            raise self.lose(f"the engine is dead ({f'`{operation}`: ' if operation else ''}one of its processes has ended)")

    def log_tail(self) -> str:
        """The last lines of the engine's log."""
        return log_tail(self.log, self._variables)

    def forget(self, number: int) -> None:
        """Forgets a call whose answers nobody awaits any more."""
        with self._lock:
            self._calls.pop(number, None)

    def cancel(self, number: int) -> None:
        """Asks the engine to give a call up."""
        with suppress(EngineLost):
            if not self.lost:
                self._send({"op": "cancel", "of": number, "id": 0}, b"")

    def failed(self, operation: str, answer: Header) -> RolloutError:
        """The error for a call that ended with an error."""
        if answer.get("is_refusal"):
            return RolloutError(f"{answer['error']} (The engine's log: {self.log})")
        if answer.get("lost") or self.processes.is_broken():
            return self.lose(f"the engine is dead (`{operation}`: {answer['error']})")
        return RolloutError(f"rollout={self._name}: `{operation}` failed: {answer['error']}\n{self.log_tail()}")

    def _ending(self) -> str:
        code = self._process.returncode
        if code is None:
            return "closed its connection"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def _send(self, header: Header, payload: bytes) -> None:
        try:
            self._socket.sendall(encode(header, payload))
        except BlockingIOError as error:
            raise self.lose(f"the engine's process has read nothing for {SEND_LIMIT_S} s") from error
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
    """A call that the engine is working on.

    Attributes:
        number: Its own.
    """

    def __init__(self, host: EngineHost, operation: str, number: int, answers: queue.SimpleQueue[Frame | None]) -> None:
        """Made by ``EngineHost.begin``."""
        self._host, self._operation, self.number, self._answers = host, operation, number, answers
        self._is_over = False

    def next(self, limit_s: float) -> Frame | None:
        """The next answer; None: none came within ``limit_s`` seconds.

        Raises:
            RolloutError: the call failed.
            EngineLost: the engine is gone.
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
                raise self._host.failed(self._operation, frame[0])
        return frame

    def result(self, limit_s: float) -> dict[str, Any]:
        """The header of the last answer.

        Raises:
            RolloutError: as ``next``.
            EngineLost: as ``next``; no sign of life for the host's ``hang_limit_s``; or it took longer than ``limit_s`` seconds.
        """
        try:
            if self._host.lost:
                raise self._host.lost
            return self._result(limit_s)
        except EngineLost:
            self.cancel()
            if self._host.outlasts:
                return {}
            raise

    def _result(self, limit_s: float) -> dict[str, Any]:
        began = time.monotonic()
        deadline = began + limit_s
        liveness = self._liveness(self._host.busy_limit_s(self._operation, limit_s))
        while (left := deadline - time.monotonic()) > 0:
            wait_s = liveness.wait_s()
            frame = self.next(min(left, wait_s))
            if frame is not None and frame[0].get("end"):
                self._host.record_duration(self._operation, time.monotonic() - began)
                return frame[0]
            if frame is None and wait_s < limit_s and time.monotonic() < deadline:
                liveness.check()
        raise self._host.lose(f"`{self._operation}` took longer than {limit_s:g} s")

    def _liveness(self, busy_limit_s: float) -> Liveness:
        return Liveness(self._host, self._operation, self._host.hang_limit_s, busy_limit_s)

    def frames(self, busy_limit_s: float) -> Iterator[Frame]:
        """Answers up to the last one, while the engine lives: when none comes it is asked for a sign of life.

        Args:
            busy_limit_s: Longest time in which it works but does not answer to that.

        Raises:
            RolloutError: as ``next``.
            EngineLost: as ``next``, or there was no sign of life for the host's ``hang_limit_s``.
        """
        liveness = self._liveness(busy_limit_s)
        while not self._is_over:
            frame = self.next(liveness.wait_s())
            if frame is None:
                liveness.check()
            else:
                liveness.answered()
                yield frame

    def cancel(self) -> None:
        """Gives the call up, unless it is over."""
        if not self._is_over:
            self._over()
            self._host.cancel(self.number)

    def _over(self) -> None:
        self._is_over = True
        self._host.forget(self.number)
