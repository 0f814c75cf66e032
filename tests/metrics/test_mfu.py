from __future__ import annotations

from rlbatch.metrics.mfu import mfu, peak_flops


def test_the_cpu_is_measured_once() -> None:
    """A CPU's peak is a measured figure of a plausible size, and the same when asked again."""
    peak = peak_flops("cpu")
    assert 1e8 < peak < 1e14
    assert peak_flops("cpu") == peak


def test_mfu_is_a_share_of_all_ranks() -> None:
    """Half of the peak of 4 ranks for 2 seconds is 0.5."""
    assert mfu(flops=4e12, seconds=2.0, world_size=4, peak_flops=1e12) == 0.5


def test_the_peak_of_the_cluster() -> None:
    """What the cluster says of its GPUs is the peak, also of cards that nobody knows; of a CPU it says nothing."""
    assert peak_flops("cuda:0", 500.0) == 5e14
    assert peak_flops("cpu", 500.0) == peak_flops("cpu")
