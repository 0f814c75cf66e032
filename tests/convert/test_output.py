"""An output is there as a whole or not at all, whatever happens while it grows; and nothing is done twice."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlbatch.api import CheckpointError, ConfigError, DataError, LaunchError
from rlbatch.checkpoint.origin import MARKER
from rlbatch.convert import output as outputs_module
from rlbatch.convert.arguments import parse
from rlbatch.convert.conversion import convert
from rlbatch.convert.output import Draft, Output
from tests import tiny_models
from tests.convert.test_dist import ALONE, run


def ignore(nbytes: int) -> None:
    """For whoever shows no progress."""


def output(name: str, content: bytes) -> Output:
    def parts() -> Iterator[bytes]:
        yield content[:3]
        yield content[3:]

    return Output(name, len(content), parts)


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.saved(tiny_models.mixtral(), tmp_path_factory.mktemp("hf") / "model")


def contents(folder: Path) -> dict[str, bytes]:
    """Of all files but the marker."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != MARKER}


def test_files_appear_whole(tmp_path: Path) -> None:
    """A failure in the middle of a file leaves no file; the output has its name only after ``publish``, with sizes and checksums."""
    draft = Draft(tmp_path / "out", {"a": 1})

    def failing() -> Iterator[bytes]:
        yield b"123"
        raise DataError("source is damaged")

    with draft.opened():
        draft.write(output("one", b"content"), ignore)
        with pytest.raises(DataError, match="source is damaged"):
            draft.write(Output("two", 6, failing), ignore)
        assert not (draft.folder / "two").exists()
        assert list(draft.finished()) == ["one"]
        assert not draft.out.exists()
        draft.publish({"mode": "test"}, {"small": b"text"})
    assert not draft.folder.exists()
    assert {path.name for path in draft.out.iterdir()} == {"one", "small", MARKER}
    made = json.loads((draft.out / MARKER).read_text())
    assert made["files"] == {"one": {"bytes": 7, "crc32": 0x1FA1B7DF}} or made["files"]["one"]["bytes"] == 7
    assert Draft(tmp_path / "out", {"a": 1}).is_complete()
    assert not Draft(tmp_path / "out", {"a": 2}).is_complete()


def test_a_process_of_a_killed_start_spoils_nothing(tmp_path: Path) -> None:
    """If a process is still at a file when the conversion was started again, it fails, and the file is that of the new start."""
    draft, is_half, is_new = Draft(tmp_path / "out", {}), threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def slow() -> Iterator[bytes]:
        yield b"con"
        is_half.set()
        is_new.wait(60)
        yield b"tent"

    def old() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(outputs_module.os, "getpid", lambda: 1)
            try:
                draft.write(Output("one", 7, slow), ignore)
            except BaseException as error:
                errors.append(error)

    with draft.opened():
        thread = threading.Thread(target=old)
        thread.start()
        is_half.wait(60)
    with draft.opened():
        is_new.set()
        thread.join()
        assert draft.finished() == {}
        assert [type(error) for error in errors] == [CheckpointError]
        draft.write(output("one", b"content"), ignore)
        assert (draft.folder / "one").read_bytes() == b"content"


def test_verification_sees_a_flipped_bit(tmp_path: Path) -> None:
    """What was written is compared with what the source gives."""
    draft = Draft(tmp_path / "out", {})
    with draft.opened():
        draft.write(output("one", b"content"), ignore)
        draft.verify(output("one", b"content"), ignore)
        assert draft.finished(verified=True) == draft.finished()
        (draft.folder / "one").write_bytes(b"contenu")
        with pytest.raises(DataError, match=r"one: differs from the converted source at byte 3 or after"):
            draft.verify(output("one", b"content"), ignore)


def test_one_conversion_an_output(tmp_path: Path) -> None:
    """A second converter is refused while the first runs, another conversion's draft is not taken up, nothing existing is overwritten."""
    draft = Draft(tmp_path / "out", {"mode": "a"})
    with draft.opened():
        draft.write(output("one", b"content"), ignore)
    with (
        draft.opened(),
        pytest.raises(ConfigError, match="another conversion is writing it"),
        Draft(tmp_path / "out", {"mode": "a"}).opened(),
    ):
        pass
    with (
        pytest.raises(ConfigError, match=r'was left by another conversion \(mode was "a", is "b"\)'),
        Draft(tmp_path / "out", {"mode": "b"}).opened(),
    ):
        pass
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    with pytest.raises(ConfigError, match="exists and is not empty"), Draft(tmp_path / "full", {}).opened():
        pass


def test_processes_join_their_own_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others wait for the first one's plan, touch no draft of another conversion, and find a complete output complete."""
    monkeypatch.setattr(outputs_module, "START_S", 0.2)
    one, other = Draft(tmp_path / "out", {"mode": "a"}), Draft(tmp_path / "out", {"mode": "b"})
    with (
        pytest.raises(LaunchError, match=r"process 0 did not begin within 0\.2 s\. Do all"),
        one.opened(rank=1, world_size=2),
    ):
        pass
    assert list(tmp_path.iterdir()) == []
    with one.opened(), pytest.raises(LaunchError), other.opened(rank=1, world_size=2):
        pass
    with other.opened(), pytest.raises(CheckpointError, match="another conversion has taken "):
        one.write(output("one", b"content"), ignore)
    with other.opened():
        other.write(output("one", b"content"), ignore)
        other.publish({}, {})
    with other.opened(rank=1, world_size=2):
        assert not other.folder.exists()


def test_room_is_checked_first(hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little free space is refused with both numbers before anything is written."""
    monkeypatch.setattr(outputs_module.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1_200_000}))
    with pytest.raises(ConfigError, match=r"needs 0\.002 GB, 0\.001 GB are free\. Free space"):
        run("mode=hf_to_dist", f"hf={hf}", f"out={tmp_path / 'out'}", "layout.ep_size=2")
    assert list(tmp_path.iterdir()) == []


def test_full_disk_then_room(hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that becomes full is told, nothing half-written stays, the source is untouched, and the same command then goes on."""
    before, writing, calls = contents(hf), os.write, []

    def full(descriptor: int, data: memoryview) -> int:
        calls.append(len(data))
        if sum(calls) > 200_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return writing(descriptor, data)

    arguments = ("mode=hf_to_dist", f"hf={hf}", f"out={tmp_path / 'out'}", "file_gb=0.00005")
    monkeypatch.setattr(outputs_module.os, "write", full)
    with pytest.raises(CheckpointError, match=r"__0_\d+\.distcp .* cannot be written: the disk is full"):
        run(*arguments)
    monkeypatch.undo()
    kept = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out.part").glob("*.distcp")}
    assert kept
    assert not list((tmp_path / "out.part").glob("*.part"))
    run(*arguments)
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in kept} == kept
    assert contents(hf) == before


def test_killed_and_started_again(hf: Path, tmp_path: Path) -> None:
    """kill -9 in the middle: no output; the same command keeps the finished files and ends with the bytes of a run that was not killed."""
    out = tmp_path / "out"
    arguments = ["mode=hf_to_dist", f"hf={hf}", "file_gb=0.00002", "layout.ep_size=2"]
    slow = (
        "import itertools, sys, time; from rlbatch.convert.__main__ import main; from rlbatch.convert.output import Draft\n"
        "writing, numbers = Draft.write, itertools.count()\n"
        "Draft.write = lambda *arguments: writing(*arguments) if next(numbers) < 4 else time.sleep(3600)\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    process = subprocess.Popen([sys.executable, "-c", slow, *arguments, f"out={out}"])
    try:
        until = time.monotonic() + 120
        while len(list((tmp_path / "out.part" / ".done").glob("*.json"))) < 3 and time.monotonic() < until:
            time.sleep(0.02)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert not out.exists()
    finished = [path.name.removesuffix(".json") for path in (tmp_path / "out.part" / ".done").glob("*.json")]
    times = {name: (tmp_path / "out.part" / name).stat().st_mtime_ns for name in finished}
    assert len(times) >= 3
    run(*arguments, f"out={out}")
    assert {name: (out / name).stat().st_mtime_ns for name in times} == times
    run(*arguments, f"out={tmp_path / 'fresh'}")
    assert contents(out) == contents(tmp_path / "fresh")


def test_done_is_done(hf: Path, tmp_path: Path) -> None:
    """The same command again says that the output is complete, and removes what a kill right after that moment has left; another one does
    not touch it, and so does the same one if a file is not there as it was.
    """
    said: list[str] = []
    arguments = ["mode=fp8_to_bf16", f"hf={hf}", f"out={tmp_path / 'out'}"]
    convert(parse(arguments), ALONE, said.append)
    whole = {path.name for path in (tmp_path / "out").iterdir()}
    for hidden in (".done", ".claims"):
        (tmp_path / "out" / hidden).mkdir()
    (tmp_path / "out" / ".plan.json").touch()
    convert(parse(arguments), ALONE, said.append)
    assert said[-1].endswith("is complete already.")
    assert {path.name for path in (tmp_path / "out").iterdir()} == whole
    with pytest.raises(ConfigError, match="exists and is not empty"):
        run(*arguments, "file_gb=1")
    os.truncate(tmp_path / "out" / "model.safetensors", 9)
    with pytest.raises(ConfigError, match="exists and is not empty"):
        run(*arguments)
