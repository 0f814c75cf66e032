"""A machine that is cut off, or lost its power: no kernel says that its ranks ended."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlbatch.launch.failures import read_first_error
from tests.cluster.processes import require
from tests.launch import watched

SPACE, HERE, THERE, NETWORK = "rlbatch-lost", "rlb-lost0", "rlb-lost1", "10.98.71"
GONE_S = 15.0


@pytest.fixture
def space() -> Iterator[str]:
    """A network namespace that one cable leads to."""
    require("ip", "unshare")
    _ip(f"netns add {SPACE}")
    try:
        _ip(f"link add {HERE} type veth peer name {THERE} netns {SPACE}")
        _ip(f"addr add {NETWORK}.1/24 dev {HERE}")
        _ip(f"link set {HERE} up")
        _ip(f"-n {SPACE} addr add {NETWORK}.2/24 dev {THERE}")
        _ip(f"-n {SPACE} link set {THERE} up")
        yield SPACE
    finally:
        _ip(f"netns del {SPACE}")


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)


def test_machine_that_is_cut_off(space: str, tmp_path: Path) -> None:
    """Both sides end within 15 s of the cut, though nothing arrives any more, and the rank behind it is named."""
    variables = [watched.rank_variables(rank, 2, 1) for rank in range(2)]
    near = watched.start(tmp_path, "hang_waiting", variables[0])
    far = watched.start(tmp_path, "hang_waiting", variables[1], within=["ip", "netns", "exec", space])
    until = time.monotonic() + 60
    while not (tmp_path / "logs/rank1.stacks").exists() and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(3)  # both have met
    _ip(f"link set {HERE} down")
    ended = watched.finish([near, far], time.monotonic())
    assert ended.codes == [1, 1]
    assert ended.seconds < GONE_S
    error = read_first_error(tmp_path)
    assert error is not None
    assert (error.rank, error.message) == (1, "no answer from its machine for 9 s, in phase generation. See logs/rank1.log.")
