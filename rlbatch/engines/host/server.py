"""The process that holds an engine: it answers one rank over a socket that it inherited, and ends with it, with all its children.

Runs under any interpreter that has the engine: ``python -c "from rlbatch.engines.host.server import main; main()" FD module:Class``.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import os
import re
import signal
import socket
import stat
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from rlbatch.engines.host.inventory import software
from rlbatch.engines.protocol.frames import LENGTHS, Header, Refused, encode, error_text
from rlbatch.engines.protocol.shared_names import name_shared_memory
from rlbatch.launch.ranks.children import END_SIGNAL, children_end_with_this_process, signal_group

_ERROR = re.compile(r"(?:^|[\])] )([A-Za-z_][\w.]*(?:Error|Exception): .+)$", re.MULTILINE)
"""The last line of a Python traceback, perhaps behind a process's name or the time."""
GPU_FULL = re.compile(
    r"CUDA out of memory\. Tried to allocate ([\d.]+ \w+)\. GPU \d+ has a total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free"
)
"""torch's words for a GPU without room: wanted, total, free."""


IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, END_SIGNAL)
"""Batch systems send these to every process of a job; the rank decides what they mean for its engine. Children inherit it."""
STOP_LIMIT_S = 10.0
FAILURES = 32
"""Failed calls whose errors are kept, the last ones."""
COLLECTED_AFTER = 100_000
"""New objects after which Python looks for unused ones. With its own 700, looking is a sixth of what importing vLLM takes."""

Send = Callable[[Header, bytes], None]


class HostedEngine(Protocol):
    """What a host serves: every method ``op_<name>`` answers the calls of that name.

    An engine may have a method ``is_lost() -> bool``: whether its own processes are gone, so that no call can succeed any more.
    """

    async def stop(self) -> None:
        """Frees what would outlive the process."""


Operation = Callable[[dict[str, Any], bytes, Send], Any]


class Server:
    """Calls from a rank to an engine, any number at once.

    A call is a frame with ``id`` and ``op``. One with ``after``, another's id, begins when that is over, and fails if that did; several
    after the same one begin in their order. Its answers carry its ``id``; the last one has ``end``, and if it failed ``error``, ``lost``:
    whether that is because the engine is, and ``is_refusal``: whether all is said.
    """

    def __init__(self, engine: HostedEngine, writer: asyncio.StreamWriter) -> None:
        self._engine, self._writer = engine, writer
        self._running: dict[int, asyncio.Task[None]] = {}
        self._turn: tuple[int, asyncio.Lock] = (0, asyncio.Lock())
        self._failures: dict[int, Exception] = {}

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Serves until the rank hangs up."""
        while True:
            try:
                header_bytes, payload_bytes = LENGTHS.unpack(await reader.readexactly(LENGTHS.size))
                header = _parse(await reader.readexactly(header_bytes))
                payload = await reader.readexactly(payload_bytes)
            except (asyncio.IncompleteReadError, ConnectionError):
                break
            if header["op"] == "cancel":
                if task := self._running.get(header["of"]):
                    task.cancel()
                continue
            task = asyncio.ensure_future(self._answer(header, payload))
            self._running[header["id"]] = task
            task.add_done_callback(partial(self._forget, header["id"]))
        for task in list(self._running.values()):
            task.cancel()

    def _forget(self, number: int, task: asyncio.Task[None]) -> None:
        self._running.pop(number, None)

    async def _answer(self, header: dict[str, Any], payload: bytes) -> None:
        number = header["id"]

        def send(answer: Header, content: bytes = b"") -> None:
            self._writer.write(encode({**answer, "id": number}, content))

        try:
            name = f"op_{header['op']}"
            operation: Operation = getattr(self if name == "op_software" else self._engine, name)
            await self._past(header.get("after"))
            send({**(await operation(header, payload, send) or {}), "end": True})
        except asyncio.CancelledError:
            send({"end": True, "error": "cancelled", "lost": False})
        except Refused as error:
            self._fail(number, error)
            with suppress(OSError):  # a full disk has no say in what the rank is told
                print(error, flush=True)
            send({"end": True, "error": str(error), "is_refusal": True, "lost": False})
        except Exception as error:  # whatever an engine raises is the rank's to judge
            self._fail(number, error)
            with suppress(OSError):
                traceback.print_exc()
            send({"end": True, "error": error_text(error), "lost": _is_lost(self._engine)})
        await self._writer.drain()

    async def op_software(self, header: dict[str, Any], payload: bytes, send: Send) -> dict[str, Any]:
        """Tells what software this interpreter has: the only call that the engine does not answer."""
        return {"software": software()}

    async def _past(self, number: int | None) -> None:
        """Waits until a call is over, behind others that wait for it; raises what it failed with."""
        if number is None:
            return
        if self._turn[0] != number:
            self._turn = number, asyncio.Lock()  # first come, first served
        async with self._turn[1]:
            if number in self._running:
                await asyncio.wait([self._running[number]])
        if number in self._failures:
            raise self._failures[number]

    def _fail(self, number: int, error: Exception) -> None:
        """Keeps a call's error for those that come after it."""
        self._failures[number] = error
        while len(self._failures) > FAILURES:
            del self._failures[next(iter(self._failures))]


def main() -> None:
    """Serves the engine named on the command line."""
    descriptor, name = int(sys.argv[1]), sys.argv[2]
    gc.set_threshold(COLLECTED_AFTER)
    children_end_with_this_process()
    name_shared_memory()
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    module, _, attribute = name.partition(":")
    connection = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    engine: HostedEngine = getattr(importlib.import_module(module), attribute)()
    asyncio.run(_serve(engine, connection))
    # What does not end by itself ends now: this is the leader of its group.
    signal_group(os.getpgrp(), signal.SIGKILL)


async def _serve(engine: HostedEngine, connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    await Server(engine, writer).serve(reader)
    try:
        await asyncio.wait_for(engine.stop(), STOP_LIMIT_S)
    except Exception:  # it ends anyway; the log says how
        traceback.print_exc()


def _parse(text: bytes) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(text)
    return header


def _is_lost(engine: HostedEngine) -> bool:
    judge: Callable[[], bool] = getattr(engine, "is_lost", bool)
    return judge()


def startup_log() -> str:
    """The text that this process and its children have written so far; empty if it goes to no file."""
    if not stat.S_ISREG(os.fstat(1).st_mode):
        return ""
    with open("/proc/self/fd/1", encoding="utf-8", errors="replace") as log:
        return log.read()


def last_error(log: str) -> str:
    """The last error that a process wrote, e.g. ``ValueError: no such file``; empty: none."""
    found = _ERROR.findall(log)
    return str(found[-1]) if found else ""
