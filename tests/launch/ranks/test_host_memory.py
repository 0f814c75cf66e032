"""Memory of control groups of both versions, as the system shows it."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from rlbatch.api import ConfigError
from rlbatch.launch.ranks import host_memory
from rlbatch.launch.ranks.host_memory import address_limit, check_addresses, oom_kills, refused

MIB = 2**20
NO_LIMIT = 9223372036854771712


def second(limit: object, used: int, cache: int, kills: int) -> Mapping[str, object]:
    stat = f"anon 1\ninactive_file {cache // 4}\nactive_file {cache - cache // 4}\n"
    events = f"low 0\noom {kills + 1}\noom_kill {kills}\noom_group_kill 7"
    return {"memory.max": limit, "memory.current": used, "memory.stat": stat, "memory.events": events}


def first(limit: int, used: int, cache: int, kills: int) -> Mapping[str, object]:
    control = f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}"
    stat = f"inactive_file 5\nactive_file 6\ntotal_inactive_file {cache // 4}\ntotal_active_file {cache - cache // 4}\n"
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": stat, "memory.oom_control": control}


@pytest.mark.parametrize(
    ("membership", "groups"),
    [
        ("0::/job/step", {"job": second(100 * MIB, 60 * MIB, 10 * MIB, 3), "job/step": second("max", 20 * MIB, 0, 3)}),
        ("0::/", {"": second(100 * MIB, 60 * MIB, 10 * MIB, 3)}),  # all that a container sees
        ("0::/elsewhere", {"": second(100 * MIB, 60 * MIB, 10 * MIB, 3)}),  # of its host's folders, which it does not see
        (
            "5:devices:/x\n4:memory:/job/step\n0::/",
            {
                "memory": first(NO_LIMIT, 0, 0, 9),
                "memory/job": first(100 * MIB, 60 * MIB, 10 * MIB, 3),
                "memory/job/step": first(NO_LIMIT, 9, 0, 3),
            },
        ),
    ],
    ids=["second", "container", "container of the host's", "first"],
)
def test_the_tightest_group_counts(
    membership: str, groups: Mapping[str, Mapping[str, object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its limit, and what is left of it with what is only kept to be read again, even if it was read twice already; kills are those of the
    innermost group that counts.
    """
    for name, files in groups.items():
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            (tmp_path / name / file).write_text(f"{content}\n")
    (tmp_path / "membership").write_text(membership + "\n")
    monkeypatch.setattr(host_memory, "ROOT", tmp_path)
    monkeypatch.setattr(host_memory, "MEMBERSHIP", tmp_path / "membership")
    assert host_memory.host_memory() == (100 * MIB, 50 * MIB)
    assert oom_kills() == 3


def test_without_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's own memory and kills."""
    monkeypatch.setattr(host_memory, "MEMBERSHIP", tmp_path / "none")
    total, free = host_memory.host_memory()
    assert 0 < free < total == psutil.virtual_memory().total
    assert f"oom_kill {oom_kills()}\n" in Path("/proc/vmstat").read_text()


def test_a_limit_of_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is one, a thread that cannot be started had no memory for its stack; else the number of threads is at its limit."""
    error = RuntimeError("can't start new thread")
    monkeypatch.setattr(resource, "getrlimit", lambda what: (resource.RLIM_INFINITY,) * 2)
    assert (address_limit(), refused(error)) == ("", "")
    check_addresses()
    monkeypatch.setattr(resource, "getrlimit", lambda what: (3 * 2**29, resource.RLIM_INFINITY))
    with pytest.raises(ConfigError, match=r"^1\.5 GiB of addresses \(ulimit -v\) are too few: a rank needs 3 with"):
        check_addresses()
    assert (address_limit(), refused(error)) == ("1.5 GiB of addresses (ulimit -v)", "can't start new thread")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "MemoryError"),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), "[Errno 12] Cannot allocate memory"),
        (RuntimeError("[enforce fail at x.cpp:1] . DefaultCPUAllocator: can't allocate memory: 1 bytes"), "can't allocate memory: 1 bytes"),
        (RuntimeError("std::bad_alloc"), "std::bad_alloc"),
        (ImportError("libx.so: cannot allocate memory in static TLS block"), ""),
        (RuntimeError("shapes differ"), ""),
    ],
)
def test_memory_that_the_system_refuses(error: Exception, said: str) -> None:
    """In whatever words; room that the loader's own table lacks is none of it."""
    assert refused(error) == said
