"""The parent's side of a jail: starts it, takes the program's output up to a limit, and ends it."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

MIB = 2**20
SETUP_S = 10.0
"""Seconds beyond a program's own limit that a jail may take to be built and to end, on a busy machine."""


class SandboxError(Exception):
    """A program could not be run: nothing is known of it.

    Attributes:
        missing: What this machine does not keep programs from -> why.
    """

    def __init__(self, message: str, missing: Mapping[str, str] | None = None) -> None:
        """Makes the error of a message and ``missing``."""
        super().__init__(message)
        self.missing = dict(missing or {})


@dataclass(frozen=True)
class Limits:
    """What one program may use.

    Attributes:
        seconds: Seconds on the clock, and processor seconds of each process.
        memory: Bytes of all its processes together; with ``limit_addresses`` also the bytes of addresses of each.
        disk: Bytes of all files.
        output: Bytes of standard output.
        processes: Processes and threads at once.
        limit_addresses: See ``memory``.
        weaker: Names of guards that the machine may lack.
        show: Folders that it sees, beside the system's.
    """

    seconds: float = 10.0
    memory: int = 512 * MIB
    disk: int = 64 * MIB
    output: int = 4 * MIB
    processes: int = 32
    limit_addresses: bool = True
    weaker: tuple[str, ...] = ()
    show: tuple[str, ...] = ()


@dataclass
class Outcome:
    """How a program ended.

    Attributes:
        end: ``exit``, ``time``, ``memory``, ``output``, or ``lost``.
        code: Its exit code; negative: the signal that ended it.
        output: Its standard output, as far as it was within the limit.
    """

    end: str
    code: int = 0
    output: bytes = b""


@cache
def interpreter() -> tuple[str, str]:
    """Path of the Python outside of this virtual environment, and its prefix, the folder that it needs."""
    path = os.path.realpath(getattr(sys, "_base_executable", sys.executable) or sys.executable)
    return path, os.path.realpath(sys.base_prefix)


@dataclass
class Jail:
    """A program that runs; ``close`` ends all of it, whatever it does."""

    process: subprocess.Popen[bytes]
    report: int
    deadline: float
    outputs: list[int] = field(default_factory=list)

    def read(self, stream: int, most: int) -> bytes | None:
        """What comes until the end of the stream, at most ``most`` bytes; None: it was more, or not over in time. What came in time counts
        whenever it is read.
        """
        parts: list[bytes] = []
        size = 0
        ready = select.poll()  # takes descriptors of any number
        ready.register(stream, select.POLLIN)
        while ready.poll(1000.0 * max(self.deadline - time.monotonic(), 0.0)):
            part = os.read(stream, 65536)
            if not part:
                return b"".join(parts)
            size += len(part)
            if size > most:
                return None
            parts.append(part)
        return None

    def outcome(self) -> dict[str, Any]:
        """The jail's own report; empty if there is none."""
        said = self.read(self.report, MIB) or b""
        with suppress(ValueError, IndexError):
            return dict(json.loads(said.splitlines()[0]))
        return {}

    def close(self) -> None:
        """Kills what is left, and waits until it is gone."""
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        self.deadline = time.monotonic() + SETUP_S
        self.read(self.report, MIB)  # its end: the last process of the jail that holds it is gone
        for stream in (self.report, *self.outputs):
            os.close(stream)


def start(
    command: Sequence[str],
    files: Mapping[str, str],
    limits: Limits,
    *,
    text: str | None = None,
    stdin: int = subprocess.DEVNULL,
    stdout: int = subprocess.DEVNULL,
    stderr: int = subprocess.DEVNULL,
) -> Jail:
    """Starts a program in a jail. In its arguments ``{jail}`` is the folder of ``files`` (name -> content), which it can read but not
    change; with a ``text`` that is its standard input. The streams are descriptors.
    """
    python, prefix = interpreter()
    job = {
        "command": list(command),
        "files": dict(files),
        "input": text,
        "seconds": limits.seconds,
        "memory": limits.memory,
        "disk": limits.disk + sum(len(part) * 4 for part in (*files.values(), text or "")),
        "processes": limits.processes,
        "limit_addresses": limits.limit_addresses,
        "weaker": list(limits.weaker),
        "show": [prefix, *limits.show],
    }
    given, give = os.pipe()
    heard, report = os.pipe()
    try:
        process = subprocess.Popen(
            [python, "-I", "-S", "-B", str(Path(__file__).with_name("jail.py")), str(given), str(report)],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=(given, report),
            env={},
            cwd="/",
            start_new_session=True,
        )
    except BaseException:
        for descriptor in (give, heard):
            os.close(descriptor)
        raise
    finally:
        os.close(given)
        os.close(report)
    with suppress(BrokenPipeError), os.fdopen(give, "w", encoding="utf-8") as file:
        json.dump(job, file)
    return Jail(process, heard, time.monotonic() + limits.seconds + SETUP_S)


def run(command: Sequence[str], files: Mapping[str, str], text: str, limits: Limits) -> Outcome:
    """Runs a program with a text as its standard input, to its end or its limits; raises SandboxError if it did not run."""
    heard, told = os.pipe()
    try:
        jail = start(command, files, limits, text=text, stdout=told)
    except BaseException:
        os.close(heard)
        raise
    finally:
        os.close(told)
    jail.outputs.append(heard)
    try:
        output = jail.read(heard, limits.output)
        if output is None:
            late = time.monotonic() >= jail.deadline
            return Outcome("time" if late else "output")
        return ended(jail.outcome(), output)
    finally:
        jail.close()


def ended(said: Mapping[str, Any], output: bytes = b"") -> Outcome:
    """How the program ended by its jail's report; raises SandboxError if it did not run."""
    if "missing" in said:
        raise SandboxError("this machine does not isolate programs", said["missing"])
    if "end" not in said:
        raise SandboxError(str(said.get("failed", "the jail ended without a word")))
    return Outcome(said["end"], int(said.get("code", 0)), output)


def converse(first: tuple[Sequence[str], Mapping[str, str]], second: tuple[Sequence[str], Mapping[str, str]], limits: Limits) -> bytes:
    """Runs two programs in a jail each, whose standard inputs and outputs lead to each other.

    Returns:
        What the first one wrote to its standard error, at most 64 KiB; empty: it did not end in time, or badly.

    Raises:
        SandboxError: one of them did not run.
    """
    pipes: list[int] = []
    jails: list[Jail] = []

    def pipe() -> tuple[int, int]:
        ends = os.pipe()
        pipes.extend(ends)
        return ends

    try:
        (ask_end, ask), (answer_end, answer), (heard, told) = pipe(), pipe(), pipe()
        jails.append(start(*second, limits, stdin=ask_end, stdout=answer))
        jails.append(start(*first, limits, stdin=answer_end, stdout=ask, stderr=told))
        for descriptor in (ask_end, ask, answer_end, answer, told):
            os.close(descriptor)
            pipes.remove(descriptor)
        said = jails[1].read(heard, 65536)
        outcome = ended(jails[1].outcome()) if said is not None else Outcome("time")
        if outcome.end == "exit" and outcome.code:
            jails[0].deadline = min(jails[0].deadline, time.monotonic() + 1.0)
            if (other := jails[0].outcome()) and "end" not in other:
                ended(other)
        return said or b"" if (outcome.end, outcome.code) == ("exit", 0) else b""
    finally:
        for jail in jails:
            jail.close()
        for descriptor in pipes:
            os.close(descriptor)


def missing(limits: Limits) -> dict[str, str]:
    """What this machine does not keep programs from, and is not among ``limits.weaker``, -> why; raises SandboxError if for another reason
    nothing runs.
    """
    python, _ = interpreter()
    try:
        outcome = run([python, "-I", "-S", "-c", "print(6 * 7)"], {}, "", limits)
    except SandboxError as error:
        if error.missing:
            return error.missing
        raise
    if outcome.output != b"42\n":
        raise SandboxError(f"a program that prints 42 did not: {outcome}")
    return {}
