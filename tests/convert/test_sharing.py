"""Processes share a conversion's files without knowing of each other: whatever becomes of one of them, the others make the output whole."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlbatch.api import CheckpointError
from rlbatch.convert import conversion, sharing
from rlbatch.convert import output as outputs_module
from rlbatch.convert.arguments import Options, parse
from rlbatch.convert.conversion import convert
from rlbatch.convert.output import Draft, Output
from rlbatch.convert.sharing import in_turn, to_be_made
from rlbatch.launch.ranks.rank_info import RankInfo
from tests import tiny_models
from tests.convert.test_dist import run
from tests.convert.test_output import contents, output
from tests.launch.watched import rank_variables, wait_for

HANGING = """
import sys, time
from rlbatch.convert.__main__ import main
from rlbatch.convert.output import Draft
Draft.write = lambda draft, output, advance: time.sleep(3600)
sys.exit(main(sys.argv[1:]))
"""


def process(rank: int, world_size: int) -> RankInfo:
    return RankInfo(rank, world_size, rank, world_size, 0, "here")


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.saved(tiny_models.mixtral(), tmp_path_factory.mktemp("hf") / "model")


@pytest.fixture(scope="module")
def alone(hf: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What one process gives."""
    out = tmp_path_factory.mktemp("alone") / "out"
    run("mode=bf16_to_fp8", f"hf={hf}", f"out={out}", "file_gb=0.00003")
    return contents(out)


def convert_together(arguments: list[str], world_size: int) -> list[BaseException]:
    """By threads, which play processes; their errors. Megatron's state, on which shapes are found, is one for all threads."""
    prepare, turn = conversion.prepare, threading.Lock()
    errors: list[BaseException] = []

    def in_turns(options: Options) -> conversion.Work:
        with turn:
            return prepare(options)

    def member(rank: int) -> None:
        try:
            convert(parse(arguments), process(rank, world_size), lambda text: None)
        except BaseException as error:
            errors.append(error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion, "prepare", in_turns)
        patch.setattr(outputs_module.os, "getpid", threading.get_ident)
        threads = [threading.Thread(target=member, args=(rank,), name=f"rank {rank}") for rank in reversed(range(world_size))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    return errors


@pytest.mark.parametrize("has_locks", [True, False])
def test_several_processes_share(
    has_locks: bool, hf: Path, alone: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three processes give what one gives, also where the file system has no locks."""

    def refused(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    if not has_locks:
        monkeypatch.setattr(fcntl, "flock", refused)
    arguments = ["mode=bf16_to_fp8", f"hf={hf}", f"out={tmp_path / 'out'}", "file_gb=0.00003", "verify=true"]
    assert convert_together(arguments, 3) == []
    assert contents(tmp_path / "out") == alone
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_a_failing_process_leaves_the_others_make(hf: Path, alone: dict[str, bytes], tmp_path: Path) -> None:
    """It ends with its error, as one whose machine cannot write; the output is complete without it."""
    writing, has_failed = Draft.write, threading.Event()

    def fail(self: Draft, output: Output, advance: object) -> None:
        if threading.current_thread().name == "rank 1":
            has_failed.set()
            raise CheckpointError("this disk is broken")
        has_failed.wait(120)  # the other would find nothing left to make
        writing(self, output, advance)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Draft, "write", fail)
        errors = convert_together(["mode=bf16_to_fp8", f"hf={hf}", f"out={tmp_path / 'out'}", "file_gb=0.00003"], 2)
    assert [str(error) for error in errors] == ["this disk is broken"]
    assert contents(tmp_path / "out") == alone


def test_what_a_killed_process_held_the_others_make(
    hf: Path, alone: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is at a file holds it against all others until it is killed; then they make the file and complete the output."""
    arguments = ["mode=bf16_to_fp8", f"hf={hf}", f"out={tmp_path / 'out'}", "file_gb=0.00003"]
    victim = subprocess.Popen([sys.executable, "-c", HANGING, *arguments], env={**os.environ, **rank_variables(1, 2)})
    claims = tmp_path / "out.part" / ".claims"
    errors: list[BaseException] = []
    write = Draft.write

    def write_beside_the_victim(draft: Draft, output: Output, advance: Callable[[int], None]) -> None:
        wait_for(lambda: len(list(claims.iterdir())) > 1)
        write(draft, output, advance)

    monkeypatch.setattr(Draft, "write", write_beside_the_victim)

    def first() -> None:
        try:
            convert(parse(arguments), process(0, 2), lambda text: None)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=first)
    try:
        thread.start()
        done = tmp_path / "out.part" / ".done"
        wait_for(lambda: len(list(done.glob("*.json"))) == len([name for name in alone if name.startswith("model-")]) - 1)
        thread.join(0.5)
        assert thread.is_alive()
    finally:
        victim.kill()
        victim.wait()
        thread.join(120)
    assert errors == []
    assert contents(tmp_path / "out") == alone


def test_what_hangs_is_made_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that a process holds, and that does not grow any more, is given to another one."""
    monkeypatch.setattr(sharing, "STALLED_S", 0.2)
    draft, file = Draft(tmp_path / "out", {}), output("one", b"content")
    with draft.opened(), draft.claimed("one") as is_held:
        given: Iterator[Output] = to_be_made(draft, [file], process(0, 1))
        assert is_held
        assert next(given) == file
        draft.write(file, lambda nbytes: None)
        assert list(given) == []


def test_each_goes_for_its_share_first() -> None:
    """Shares are disjoint and of about the same size; then, from the end, what the other has left, so that nobody is idle."""
    files = [output(str(size), b"x" * size) for size in range(1, 7)]
    orders = [[file.nbytes for file in in_turn(files, process(rank, 2))] for rank in range(2)]
    assert orders == [[6, 3, 2, 1, 4, 5], [5, 4, 1, 2, 3, 6]]
