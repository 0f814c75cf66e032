"""A machine that is cut off, or lost its power: no kernel says that its ranks ended."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlbatch.launch.records.failures import read_first_error
from tests.cluster.hosts import unused_prefix
from tests.cluster.processes import require
from tests.launch import watched

GONE_S = 15.0


@pytest.fixture
def space() -> Iterator[str]:
    """A network namespace that one cable of the same name leads to."""
    require("ip", "unshare")
    name, network = unused_prefix("rlblost"), f"10.98.{random.SystemRandom().randrange(256)}"
    _ip(f"netns add {name}")
    try:
        _ip(f"link add {name} type veth peer name eth0 netns {name}")
        _ip(f"addr add {network}.1/24 dev {name}")
        _ip(f"link set {name} up")
        _ip(f"-n {name} addr add {network}.2/24 dev eth0")
        _ip(f"-n {name} link set eth0 up")
        yield name
    finally:
        _ip(f"netns del {name}")


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)


def test_machine_that_is_cut_off(space: str, tmp_path: Path) -> None:
    """Both sides end within 15 s of the cut, though nothing arrives any more, and the rank behind it is named."""
    variables = [watched.rank_variables(rank, 2, 1) for rank in range(2)]
    near = watched.start(tmp_path, "hang_waiting", variables[0])
    far = watched.start(tmp_path, "hang_waiting", variables[1], within=["ip", "netns", "exec", space])
    watched.wait_for(lambda: len(list(tmp_path.glob("waits.*"))) == 2)
    time.sleep(1)  # what each does now has reached the other
    _ip(f"link set {space} down")
    ended = watched.finish([near, far])
    assert ended.codes == [1, 1]
    ended.watch.assert_within(GONE_S)
    error = read_first_error(tmp_path)
    assert error is not None
    assert (error.rank, error.message) == (1, "no answer from its machine for 9 s, in phase generation. See logs/rank1.log.")
