"""The job's store: what ranks write, wait for, and say when they meet."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from rlbatch.api import ConfigError, LaunchError
from rlbatch.launch.membership.store import JobStore, open_store
from rlbatch.launch.ranks.interfaces import listen
from rlbatch.launch.ranks.rank_info import RankInfo
from tests.stopwatch import Stopwatch

RANKS = 3
HOSTS = ("n1", "n2", "n2")


@pytest.fixture
def stores() -> Iterator[list[JobStore]]:
    """The stores of three ranks, each with a connection of its own."""
    listening = listen("127.0.0.1", 0, 8)
    info = RankInfo(0, RANKS, 0, 1, 0, "n1", master_addr="127.0.0.1", master_port=listening.getsockname()[1])
    yield [open_store(replace(info, rank=rank), 20.0, HOSTS, None if rank else listening) for rank in range(RANKS)]


def on_all(stores: list[JobStore], call: Callable[[JobStore], list[str]]) -> list[list[str]]:
    with ThreadPoolExecutor(len(stores)) as pool:
        return list(pool.map(call, stores))


def test_values_and_counters(stores: list[JobStore]) -> None:
    """What one rank writes, the others read: any bytes; a counter goes up by what was added."""
    stores[1].set("key", b"\xff\x00")
    assert stores[2].get("key", 1.0) == b"\xff\x00"
    assert (stores[0].check("key"), stores[0].check("other")) == (True, False)
    assert [store.add("next", 2) for store in stores] == [2, 4, 6]
    assert stores[1].clone().get("key", 1.0) == b"\xff\x00"


def test_a_value_that_does_not_come(stores: list[JobStore]) -> None:
    """The wait ends at its time, and says for what it was."""
    watch = Stopwatch()
    with pytest.raises(LaunchError, match=r"^store: nobody wrote `key` within 0.2 s"):
        stores[1].get("key", 0.2)
    watch.assert_within(5)


def test_barrier_returns_every_value(stores: list[JobStore]) -> None:
    """In the order of ranks, to every rank, time after time; and keys do not pile up."""
    for turn in range(3):
        values = on_all(stores, lambda store, turn=turn: store.barrier("step", 20.0, f"{store.info.rank} of turn {turn}"))  # type: ignore[misc]
        assert values == [[f"{rank} of turn {turn}" for rank in range(RANKS)]] * RANKS
    before = stores[0].store.num_keys()
    on_all(stores, lambda store: store.barrier("step", 20.0))
    assert stores[0].store.num_keys() == before


def test_barrier_waits_for_the_last(stores: list[JobStore]) -> None:
    """Nobody goes on before everybody has come."""
    passed: list[float] = []

    def come(store: JobStore) -> None:
        store.barrier("step", 20.0)
        passed.append(time.monotonic())

    threads = [threading.Thread(target=come, args=(store,)) for store in stores[:2]]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    assert not passed
    last = time.monotonic()
    stores[2].barrier("step", 20.0)
    for thread in threads:
        thread.join()
    assert min(passed) > last


def test_barrier_names_who_is_missing(stores: list[JobStore]) -> None:
    """Ranks and hosts that did not come in time."""
    with pytest.raises(LaunchError, match=r"^step: rank 0 \(host n1\), rank 2 \(host n2\) did not come within 0.2 s\."):
        stores[1].barrier("step", 0.2)


def test_many_missing_ranks_are_counted(stores: list[JobStore]) -> None:
    """A message stays a line, however large the job."""
    store = JobStore(stores[0].store, replace(stores[0].info, world_size=512))
    assert store.named(range(1, 512)) == "rank 1, rank 2, rank 3, rank 4, rank 5, rank 6, rank 7, rank 8 and 503 more"


def test_address_is_needed() -> None:
    """A process that nobody gave an address is no rank of a job."""
    with pytest.raises(ConfigError, match=r"^MASTER_ADDR=: is not set"):
        open_store(RankInfo(0, 1, 0, 1, 0, "n1"), 1.0)


def test_ipv6() -> None:
    """The store may be at an IPv6 address."""
    listening = listen("::1", 0, 8)
    assert listening.family == socket.AF_INET6
    info = RankInfo(0, 2, 0, 2, 0, "n1", master_addr="::1", master_port=listening.getsockname()[1])
    first, second = open_store(info, 20.0, (), listening), open_store(replace(info, rank=1), 20.0)
    first.set("key", b"value")
    assert second.get("key", 5.0) == b"value"
