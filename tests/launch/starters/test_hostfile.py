"""Hostfiles of every launcher's style, and how faulty ones are refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlbatch.api import ConfigError
from rlbatch.launch.starters.hostfile import Host, parse_hostfile


def parse(text: str, gpus_per_node: int | None = 8) -> dict[str, int | None]:
    return {host.name: host.slots for host in parse_hostfile(text, "hosts", gpus_per_node)}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1 slots=4\nn2 slots=2\n", {"n1": 4, "n2": 2}),
        ("n1 slot=4\nn2 count=2\nn3 cpu=1", {"n1": 4, "n2": 2, "n3": 1}),
        ("n1:4\nn2:2 ifhn=n2-ib0", {"n1": 4, "n2": 2}),
        ("n1 slots=4 max_slots=8\nn2 max-slots=2 slots=2\nn3 slots=1 slots_max=1", {"n1": 4, "n2": 2, "n3": 1}),
        ("n1\nn2 slots=2\n", {"n1": 8, "n2": 2}),
        ("n1\nn2\nn1\nn1\n", {"n1": 3, "n2": 1}),
        ("n1\nn1\nn2 slots=4\n", {"n1": 2, "n2": 4}),
        ("# all\n\nn1 slots=4 # first\n  \nn2 slots=2// second\n/* n3 slots=1\n n4 */n5 slots=3\n", {"n1": 4, "n2": 2, "n5": 3}),
        ("\ufeffn1\tslots=4  \r\n\r\n\t n2 slots=2\r\n", {"n1": 4, "n2": 2}),
        ("n1 slots=4\rn2 slots=2", {"n1": 4, "n2": 2}),
        ("n1 slots = 4\nn2 slots= 2 max_slots =2\n", {"n1": 4, "n2": 2}),
        ("n1\u00a0slots=4", {"n1": 4}),
        ("GPU-A.Example.ORG SLOTS=4\nnode_1. slots=08", {"GPU-A.Example.ORG": 4, "node_1.": 8}),
        ("10.0.0.1 slots=4\n10.0.0.2:2", {"10.0.0.1": 4, "10.0.0.2": 2}),
        ("alice@n1 slots=4\nbob@n2:2\nroot@[fd00::1]:3", {"alice@n1": 4, "bob@n2": 2, "root@fd00::1": 3}),
        ("fd00::1 slots=4\n[fd00::2]:2\n[fd00::3] slots=1", {"fd00::1": 4, "fd00::2": 2, "fd00::3": 1}),
        ("fd00::1:4\nfe80::1%eth0", {"fd00::1:4": 8, "fe80::1%eth0": 8}),
        ("n[1-2,007] slots=4\nr[1-2]x[3-4]:2", {"n1": 4, "n2": 4, "n007": 4, "r1x3": 2, "r1x4": 2, "r2x3": 2, "r2x4": 2}),
    ],
)
def test_styles(text: str, hosts: dict[str, int | None]) -> None:
    """Open MPI, MPICH, Intel MPI, PBS, bare names, IPv6 and ranges, with what editors leave in files; the order is kept."""
    assert list(parse(text).items()) == list(hosts.items())


def test_unknown_slots() -> None:
    """Without GPUs per node a bare host's slots are unknown, not guessed."""
    assert parse_hostfile("n1\nn2 slots=2") == [Host("n1", None), Host("n2", 2)]


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("", 1, "names no host"),
        ("\ufeff\r\n# n1 slots=8\n", 1, "names no host"),
        ("n1 slots=8\nn2 slots=0", 2, "slots=0: must be a number from 1 to 4096"),
        ("n1 slots=-8", 1, "slots=-8: must be a number"),
        ("n1 slots=two", 1, "slots=two: must be a number"),
        ("n1 slots=8.0", 1, "slots=8.0: must be a number"),
        ("n1 slots=+8", 1, "slots=+8: must be a number"),
        ("n1 slots=８", 1, r"slots=\uff18: must be a number"),
        ("n1 slots=", 1, "slots=: must be a number"),
        (f"n1 slots={'8' * 5000}", 1, "must be a number from 1 to 4096"),
        ("n1:0", 1, "slots=0: must be a number"),
        ("n1:two", 1, "slots=two: must be a number"),
        ("n1:", 1, "slots=: must be a number"),
        ("[fd00::1]:0", 1, "slots=0: must be a number"),
        ("n1 slots=8 max_slots=0", 1, "max_slots=0: must be a number"),
        ("n1 slots=8 max_slots=4", 1, "slots=8 is more than max_slots=4"),
        ("n1 max_slots=4", 1, "slots=8 is more than max_slots=4"),
        ("n1 slots=8 gpus=8", 1, "unknown key `gpus`. Known: slots"),
        ("rank 0=n1 slot=1:0-2", 1, "unknown key `0`"),
        ("n1 8", 1, "extra word `8`. Write one host a line, `n1 slots=8`"),
        ("n1 n2 slots=8", 1, "extra word `n2`"),
        ("n1 slots 8", 1, "extra word `slots`"),
        ("n1 slots=4 slots=4", 1, "`slots=4` says again how many slots"),
        ("n1:4 slots=4", 1, "`slots=4` says again how many slots"),
        ("n1 slots=4\n\n# again\nn1 slots=4", 4, "n1 is also in line 1"),
        ("n1 slots=4\nn1", 2, "n1 is also in line 1"),
        ("n1\nn1:4", 2, "n1 is also in line 1"),
        ("n1.Example slots=4\nbob@N1.example. slots=4", 2, "N1.example. is also in line 1"),
        ("FD00::1 slots=4\n[fd00:0::1]:4", 2, "fd00:0::1 is also in line 1"),
        ("n[1-3] slots=4\nn2 slots=4", 2, "n2 is also in line 1"),
        ("/* a\nb */\nn1 bad", 3, "extra word `bad`"),
        ("n1,n2", 1, "`n1,n2` is no host"),
        ("n[1-2],n4 slots=8", 1, "`n[1-2],n4` is no host"),
        ("n[3-1] slots=8", 1, "host=n[3-1]: the range 3-1 descends"),
        ("n[1-9999999] slots=8", 1, "host=n[1-9999999]: 9999999 names, at most"),
        ("n1 slots=8\nslots=8", 2, "`slots=8` is no host"),
        ("n1:8:2", 1, "`n1:8:2` is no host"),
        ("[n1:x]:8", 1, "host=[n1: brackets must be closed"),
        ("-oProxyCommand=x", 1, "is no host"),
        ("n1\u200b slots=8", 1, r"`n1\u200b` is no host"),
        ("n1\x00 slots=8", 1, r"`n1\x00` is no host"),
        ("/* open\nn1 slots=8", 1, "`/*` is no host"),
        ("@n1 slots=8", 1, "`@n1` has no user before the @"),
        ("n[1-40000]\nm[1-40000]", 2, "more than 65536 hosts"),
    ],
)
def test_refusals(text: str, line: int, reason: str) -> None:
    """A faulty file is refused in one line with its path, the line and the reason."""
    with pytest.raises(ConfigError, match=rf"^my/hosts:{line}: .*{re.escape(reason)}") as caught:
        parse_hostfile(text, "my/hosts", 8)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_examples(repository: Path) -> None:
    """Each file of hostfiles/ begins with a comment and is read as it says."""
    expected = {
        "openmpi.txt": {"n01": 8, "n02": 8, "alice@n03.cluster.local": 4},
        "mpich.txt": {"n01": 8, "n02": 8},
        "bare.txt": {"10.0.0.1": 8, "10.0.0.2": 8},
        "pbs.txt": {"n01": 2, "n02": 1},
        "ranges.txt": {"n01": 8, "n02": 8, "n03": 8, "n07": 8, "rack1-a4": 8, "rack2-a4": 8},
        "ipv6.txt": {"fd00::1": 8, "fd00::2": 8},
    }
    texts = {path.name: path.read_text(encoding="utf-8") for path in (repository / "hostfiles").iterdir()}
    assert {name: parse(text) for name, text in texts.items()} == expected
    assert all(text.startswith("# ") for text in texts.values())
