"""The processes of one conversion notice at once that one of them was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rlbatch.convert import presence
from rlbatch.convert.output import TEAM
from rlbatch.convert.presence import Presence
from tests import tiny_models
from tests.launch.watched import rank_variables, wait_for
from tests.stopwatch import Stopwatch

ENDED_S = 15.0
"""From the kill to the end of the last process: looks every 2 s, and on top what a busy machine takes."""
SLOW = """
import os, sys, time
from rlbatch.convert import conversion
from rlbatch.convert.__main__ import main
from rlbatch.convert.output import Draft
rank, writing, preparing = int(os.environ["PMI_RANK"]), Draft.write, conversion.prepare
def write(draft, output, advance):
    if "others write" in sys.argv[1] and not rank:
        return writing(draft, output, advance)
    while True:
        advance(0)
        time.sleep(0.1)
def prepare(options):
    if "first prepares" in sys.argv[1] and not rank:
        time.sleep(3600)
    return preparing(options)
Draft.write, conversion.prepare = write, prepare
sys.exit(main(sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.saved(tiny_models.mixtral(), tmp_path_factory.mktemp("hf") / "model")


@pytest.mark.parametrize(
    ("phase", "processes", "victim", "how"),
    [
        ("all write", 3, 1, "without a word on host "),
        ("all write", 2, 0, "without a word on host "),
        ("others write", 2, 1, "without a word on host "),
        ("first prepares", 2, 0, "before it said what is to be done; its own output may say why"),
    ],
)
def test_a_killed_process_is_named(hf: Path, tmp_path: Path, phase: str, processes: int, victim: int, how: str) -> None:
    """kill -9 to one: all others end within seconds with exit code 1 and one line that names it, whatever they do at that moment."""
    team = tmp_path / "out.part" / TEAM
    arguments = ["mode=bf16_to_fp8", f"hf={hf}", f"out={tmp_path / 'out'}", "file_gb=0.00003"]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SLOW, phase, *arguments],
            env={**os.environ, **rank_variables(rank, processes)},
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(processes)
    ]
    try:
        wait_for(lambda: len(list(team.glob("alive.*"))) == processes and (phase == "first prepares" or (team / "start.json").exists()))
        time.sleep(1.0)  # the others look, and see it alive
        ranks[victim].kill()
        watch = Stopwatch()
        said = [rank.communicate(timeout=120)[1] for rank in ranks]
        watch.assert_within(ENDED_S)
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [-signal.SIGKILL if rank == victim else 1 for rank in range(processes)]
    who = f" on host {os.uname().nodename}, process id {ranks[victim].pid} (killed, or out of memory?)" if "host" in how else ""
    line = (
        f"process {victim}: out={tmp_path / 'out'}: it ended {how.removesuffix(' on host ')}{who}. Start again: what is finished is kept.\n"
    )
    assert [text.splitlines(keepends=True)[-1] for rank, text in enumerate(said) if rank != victim] == [line] * (processes - 1)


def test_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process is there while it holds its lock, also after the folder was cleared, and gone only if it ended without leaving; one that
    has no lock to hold, or is silent on a machine that the lock may not reach, is not gone before its time.
    """
    monkeypatch.setattr(presence, "BEAT_S", 0.05)
    looks = Presence(tmp_path, 0)
    with Presence(tmp_path, 1):
        assert (looks.is_there(1), looks.is_gone(1)) == (True, False)
        looks.clear()
        assert looks.is_there(1)
        (tmp_path / "alive.1").unlink()
        wait_for(lambda: looks.is_there(1))
    assert (looks.is_there(1), looks.is_gone(1)) == (False, False)
    with pytest.raises(KeyboardInterrupt), Presence(tmp_path, 1):
        raise KeyboardInterrupt
    assert (looks.is_there(1), looks.is_gone(1)) == (False, True)
    place = tmp_path / "alive.1"
    text = place.read_text()
    place.write_text(text.replace("locked", "unlocked"))
    assert not looks.is_gone(1)
    place.write_text(text.replace(text.split()[0], "another-machine"))
    assert not looks.is_gone(1)
    monkeypatch.setattr(presence, "UNLOCKED_S", 0.0)
    assert looks.is_gone(1)
    looks.clear()
    assert not list(tmp_path.iterdir())
    assert not [thread for thread in threading.enumerate() if thread.name == "rlbatch-presence"]
