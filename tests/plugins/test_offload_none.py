"""``offload=none`` changes nothing."""

import pytest

from rlbatch.api import OptimizerSpec
from rlbatch.registry import load_plugins


def test_the_optimizer_is_built_as_specified() -> None:
    """The spec comes back as it went in."""
    spec = OptimizerSpec({"lr": 1.0})
    assert load_plugins().build_offload("none", {}).configure_optimizer(spec) is spec


def test_phases_may_repeat_and_pass_errors_on() -> None:
    """Phases can be entered again and again, alternating, and an exception inside one is not swallowed."""
    strategy = load_plugins().build_offload("none", {})
    for _ in range(2):
        with strategy.generating():
            pass
        with strategy.training():
            pass
    with pytest.raises(ZeroDivisionError), strategy.generating():
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), strategy.training():
        raise ZeroDivisionError
