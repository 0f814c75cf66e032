"""The rank pool: results, failures, time-outs, and that nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from rlbatch.rank_pools import RankFailure, RankPool, RankPools
from tests.leftovers import shared_by
from tests.stopwatch import Stopwatch


def add_ranks(offset: int) -> tuple[int, float, int]:
    import torch
    from torch import distributed

    total = torch.tensor([float(distributed.get_rank() + offset)])
    distributed.all_reduce(total)
    return distributed.get_rank(), total.item(), os.getpid()


def rank_1_raises_while_rank_0_waits() -> None:
    from torch import distributed

    if distributed.get_rank() == 1:
        raise ValueError("a broken invariant")
    distributed.barrier()


def rank_1_dies() -> None:
    from torch import distributed

    if distributed.get_rank() == 1:
        os._exit(7)
    distributed.barrier()


def rank_0_hangs() -> int:
    from torch import distributed

    if distributed.get_rank() == 0:
        time.sleep(600)
    return os.getpid()


def start_a_child() -> int:
    return subprocess.Popen(["sleep", "600"]).pid


def a_tensor() -> object:
    import torch

    return torch.arange(1_000_000)


def test_every_rank_answers_in_order_and_stays_warm(rank_pool: RankPools) -> None:
    """Results come by rank, collectives span the pool, and a second call meets the same processes without paying the imports."""
    first = rank_pool(2).run(add_ranks, 10)
    watch = Stopwatch()
    second = rank_pool(2).run(add_ranks, 20)
    watch.assert_within(1.0)
    assert [answer[:2] for answer in first] == [(0, 21.0), (1, 21.0)]
    assert [answer[:2] for answer in second] == [(0, 41.0), (1, 41.0)]
    assert [answer[2] for answer in first] == [answer[2] for answer in second]


def test_ranks_rest_between_calls(rank_pool: RankPools) -> None:
    """They are stopped, so that gloo's threads take no processor from other tests, and go on with the next call."""
    pids = rank_pool(2).run(os.getpid)
    watch = Stopwatch()
    while {Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids} != {"T"}:
        assert watch.passed_s < 60
        time.sleep(0.01)
    assert rank_pool(2).run(os.getpid) == pids


def test_tensors_come_back_without_shared_memory(rank_pool: RankPools) -> None:
    """A tensor result is a copy in this process; /dev/shm is not used."""
    before = shared_by(os.getpid())
    results = rank_pool(2).run(a_tensor)
    assert [int(result.sum()) for result in results] == [499999500000] * 2
    assert shared_by(os.getpid()) == before


def test_a_failing_rank_is_named_and_the_pool_recovers() -> None:
    """The test sees rank and traceback at once although the other rank hangs in a barrier; the next call works."""
    pool = RankPool(2)
    try:
        with pytest.raises(RankFailure, match=r"(?s)rank 1 of 2 raised.*rank_1_raises_while_rank_0_waits.*ValueError: a broken invariant"):
            pool.run(rank_1_raises_while_rank_0_waits)
        with pytest.raises(RankFailure, match="rank 1 of 2 ended with exit code 7"):
            pool.run(rank_1_dies)
        assert [answer[1] for answer in pool.run(add_ranks, 0)] == [1.0, 1.0]
    finally:
        pool.close()


def test_a_hanging_rank_is_named_and_ended() -> None:
    """Past the time-out the error names the silent rank only, and its process is gone."""
    pool = RankPool(2)
    pids = [answer[2] for answer in pool.run(add_ranks, 0)]
    with pytest.raises(RankFailure, match=r"no answer within 5 s from rank 0 of 2$"):
        pool.run(rank_0_hangs, timeout_s=5.0)
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_local_function_is_refused(rank_pool: RankPools) -> None:
    """What a rank cannot import is refused before anything runs."""
    with pytest.raises(ValueError, match="Move it to the top of its module"):
        rank_pool(2).run(lambda: None)


def test_closing_ends_children_too() -> None:
    """No process stays behind, not even one that a test's function started."""
    pool = RankPool(1)
    (child,) = pool.run(start_a_child)
    assert psutil.pid_exists(child)
    pool.close()
    assert _gone(child)


def test_killing_the_parent_ends_the_ranks(tmp_path: Path) -> None:
    """kill -9 of the process that owns a pool ends its workers within seconds, also while they are busy."""
    script = textwrap.dedent("""
        from rlbatch.rank_pools import RankPool
        from tests.test_rank_pools import add_ranks, rank_0_hangs
        pool = RankPool(2)
        print(*(answer[2] for answer in pool.run(add_ranks, 0)), flush=True)
        pool.run(rank_0_hangs)
    """)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert all(_gone(pid) for pid in pids)


def test_pools_make_room_for_larger_ones() -> None:
    """Pools stay warm while they fit together; the least recently used goes first."""
    pools = RankPools(max_processes=3)
    one, two = pools(1), pools(2)
    assert pools(1) is one
    assert pools(2) is two
    pools(3)
    assert pools(1) is not one
    pools.close()


def _gone(pid: int) -> bool:
    watch = Stopwatch()
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            if watch.passed_s > 60:
                return False
            time.sleep(0.05)
    watch.assert_within(5)
    return True
