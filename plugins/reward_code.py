"""``reward=code``: 1 if the program in the response passes all tests of the label, else 0.

The program is the last fenced block behind any ``</think>``, of ``options.languages`` if there is one of these; without any fence the whole
text. It runs in a jail (``code_sandbox``). Verdicts are made outside of it: what it prints, and how it ends, decides nothing else.

Labels (a JSON value, or a text of it), each with a ``solution`` or without:

- ``{"inputs": [...], "outputs": [...]}``, or a list of ``{"input": ..., "output": ...}``: standard input and output. Spaces at ends of
  lines, empty lines at the end and how many spaces are between words do not count; numbers with decimals are equal to about six digits.
- The same with ``fn_name`` (also ``entry_point``, ``metadata.func_name``): arguments and results of a function, or a ``Solution``'s method.
- ``["assert f(1) == 2", ...]``, ``{"test_list": [...], "setup": ...}``, ``{"test": "def check(candidate): ...", "entry_point": ...}``, or a
  text: Python. Names of the program are functions and objects in another process; what they return is plain data.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from rlbatch.api import ConfigError, Configurable, Count, DataError, Range, Reward, RewardError, RewardSpec, Sample, hookimpl
from rlbatch.api import Seconds as Limit
from rlbatch.api.values import option

from .code_sandbox.labels import Checks, checks_of
from .code_sandbox.sandbox import MIB, SETUP_S, Limits, SandboxError, converse, interpreter, missing, run

FOLDER = Path(__file__).parent / "code_sandbox"
GUARDS = ("user", "files", "processes", "network", "memory", "syscalls")
_FENCE = re.compile(r"^[ \t]*```[ \t]*([^\n`]*)\n(.*?)(?:^[ \t]*```[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
Mebibytes = Annotated[int, Range(least=16, most=2**20)]


@dataclass(frozen=True)
class Options:
    """Options of ``code``."""

    seconds: Limit = option(10.0, "Limit of one test's program, or of all calls and assertions of a label.")
    answer_seconds: Limit = option(60.0, "Limit of one answer: no further test begins.")
    memory_mib: Mebibytes = option(512, "Memory of a program, all its processes together, MiB.")
    disk_mib: Mebibytes = option(64, "What it may write, MiB; it is in memory too.")
    output_mib: Mebibytes = option(16, "What it may print, MiB.")
    processes: Count = option(32, "Processes and threads of a program at once.")
    limit_addresses: bool = option(True, "Also limit addresses to memory_mib; false for what reserves more than it uses (Java, Go, Node).")
    command: tuple[str, ...] = option(
        (), "What runs programs in tests of standard input, e.g. [/usr/bin/node,{file}]; empty: this Python, no packages."
    )
    languages: tuple[str, ...] = option(("python", "py", "python3"), "Names of fences that hold a program.")
    show: tuple[str, ...] = option((), "Folders that programs see, beside the system's, e.g. of a compiler.")
    partial: bool = option(False, "The share of tests of standard input that pass, in the place of 1 or 0.")
    solution_seconds: float = option(10.0, "How long submit runs the labels' solutions against their tests, the first rows first; 0: not.")
    allow_weaker: tuple[str, ...] = option(
        (), f"What this machine need not keep programs from: {', '.join(GUARDS)}. Think before you name any."
    )

    def __post_init__(self) -> None:
        """Refuses names of guards that do not exist, and a command that cannot run the program's file."""
        if unknown := [name for name in self.allow_weaker if name not in GUARDS]:
            raise ValueError(f"allow_weaker={unknown[0]}: must be of {', '.join(GUARDS)}")
        if self.command and not any("{file}" in part for part in self.command):
            raise ValueError("command: must have {file} for the program's file")
        if self.command and not os.path.isabs(self.command[0]):
            raise ValueError(f"command: must begin with a path from the root, not {self.command[0]}")

    @property
    def limits(self) -> Limits:
        """The limits of each program that is run."""
        sizes = {"memory": self.memory_mib * MIB, "disk": self.disk_mib * MIB, "output": self.output_mib * MIB}
        return Limits(
            self.seconds,
            processes=self.processes,
            limit_addresses=self.limit_addresses,
            weaker=self.allow_weaker,
            show=self.show,
            **sizes,
        )


def program_of(response: str, languages: Sequence[str]) -> str:
    """The program in a response; empty: there is none."""
    text = response.rpartition("</think>")[2]
    blocks = [(name.strip().lower().partition(" ")[0], body) for name, body in _FENCE.findall(text)]
    if not blocks:
        return text
    return str(next((body for name, body in reversed(blocks) if name in languages), blocks[-1][1]))


def judge(program: str, tests: Checks, options: Options) -> float:
    """The share of the tests that a program passes; of calls and assertions all or none. Raises SandboxError if it could not be run."""
    if not program.strip():
        return 0.0
    if not tests.streams:
        return float(_passes(program, tests, options))
    python, _ = interpreter()
    command = [part.replace("{file}", "{jail}/program") for part in options.command] or [python, "-I", "-B", "{jail}/program"]
    began, passed = time.monotonic(), 0
    for text, expected in tests.streams:
        left = options.answer_seconds - (time.monotonic() - began)
        if left <= 0:
            break
        outcome = run(command, {"program": program}, text, options.limits)
        is_right = (outcome.end, outcome.code) == ("exit", 0) and same_output(outcome.output.decode("utf-8", "replace"), expected)
        passed += is_right
        if not is_right and not options.partial:
            break
    return passed / len(tests.streams)


def _passes(program: str, tests: Checks, options: Options) -> bool:
    python, _ = interpreter()
    job = {"entry": tests.entry, "calls": tests.calls} if tests.calls else {"entry": tests.entry, "tests": tests.code}
    mine = {**_source("wire.py", "tester.py"), "tests.json": json.dumps(job)}
    theirs = {**_source("wire.py", "candidate.py"), "program.py": program}
    tester = ([python, "-I", "-S", "-B", "{jail}/tester.py"], mine)
    return converse(tester, ([python, "-I", "-B", "{jail}/candidate.py"], theirs), options.limits) == b"passed"


def _source(*names: str) -> dict[str, str]:
    return {name: (FOLDER / name).read_text(encoding="utf-8") for name in names}


def same_output(given: str, expected: str) -> bool:
    """Whether a program printed what it should."""
    mine, right = ([line.rstrip() for line in text.rstrip().split("\n")] for text in (given, expected))
    if mine == right:
        return True
    words, wanted = given.split(), expected.split()
    return [len(line.split()) for line in mine] == [len(line.split()) for line in right] and all(map(_same_word, words, wanted))


def _same_word(given: str, expected: str) -> bool:
    if given == expected:
        return True
    if "." not in expected or len(given) > 40 or len(expected) > 40:
        return False
    try:
        return math.isclose(float(given), float(expected), rel_tol=1e-6, abs_tol=1e-9)
    except ValueError:
        return False


def build(options: Options) -> Reward:
    """The reward; raises ConfigError if this machine cannot keep programs from what they must not see or do."""
    check_machine(options)

    def code(samples: Sequence[Sample]) -> list[float]:
        return [_score(sample, options) for sample in samples]

    return code


def _score(sample: Sample, options: Options) -> float:
    try:
        passed = judge(program_of(sample.response, options.languages), checks_of(sample.prompt.label), options)
    except ValueError as error:
        raise RewardError(f"reward=code: label of prompt {sample.prompt.prompt_id} {error}") from error
    except SandboxError as error:
        raise RewardError(f"reward=code: prompt {sample.prompt.prompt_id} sample {sample.sample_index} was not run: {error}") from error
    return passed if options.partial else float(passed == 1.0)


def deadline_s(options: Options) -> float:
    """Seconds after which scoring an answer is given up, more than its programs may take."""
    return options.answer_seconds + options.seconds + 2 * SETUP_S


def check_machine(options: Options) -> None:
    """Refuses, with ConfigError, a machine that does not isolate programs, unless told which guards may be missing."""
    try:
        found = missing(options.limits)
    except SandboxError as error:
        raise ConfigError(
            f"reward=code: no program runs in its sandbox here: {error}. Correct the machine, or choose another."
        ) from PermissionError(str(error))
    if found:
        said = "; ".join(f"{what} ({why})" for what, why in found.items())
        # Of a PermissionError: what submit's machine may not do is left to the nodes, which may.
        raise ConfigError(
            f"reward=code: this machine cannot isolate programs: it lacks {said}. Allow user namespaces (sysctl "
            "user.max_user_namespaces, kernel.unprivileged_userns_clone; containers: --security-opt seccomp=unconfined), or accept it: "
            f"reward.options.allow_weaker=[{','.join([*options.allow_weaker, *found])}]."
        ) from PermissionError(said)


@lru_cache(maxsize=8)
def _budget(options: Options) -> list[float]:
    """Seconds that are left for running solutions."""
    return [options.solution_seconds]


def check_label(options: Options, label: Any) -> None:
    """Refuses, with DataError, labels without tests, and, as long as there is time, those whose own solution does not pass them."""
    try:
        tests = checks_of(label)
    except ValueError as error:
        raise DataError(f"label {error}") from error
    budget = _budget(options)
    if not tests.solution or budget[0] <= 0:
        return
    began = time.monotonic()
    try:
        passed = judge(program_of(tests.solution, options.languages), tests, options)
    except SandboxError:  # of this machine, which may be no node: told where it runs
        budget[0] = 0.0
        return
    budget[0] -= time.monotonic() - began
    if passed != 1.0:
        raise DataError("label: its own solution does not pass its tests. Correct or remove the row.")


@hookimpl
def rlbatch_register_rewards() -> Mapping[str, Configurable]:
    """Supplies ``code``."""
    return {"code": RewardSpec(build, Options, check_label=check_label, scope="sample", timeout_s=deadline_s)}
