"""What a plugin raises is told with its name, whatever it is; what it changes of the process's state stays with it."""

import decimal
import json
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlbatch.api import ConfigError, PluginError, RewardError
from rlbatch.foreign_code import foreign_code, foreign_context, state_kept
from rlbatch.launch.records.failures import StoppedBySignal
from rlbatch.launch.shutdown.signals import Interrupted

CHANGES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "default dtype": (lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype),
    "gradients": (lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
    "default device": (lambda: torch.set_default_device("meta"), lambda: torch.ones(1).device),
    "deterministic algorithms": (lambda: torch.use_deterministic_algorithms(True), torch.are_deterministic_algorithms_enabled),
    "matmul precision": (lambda: torch.set_float32_matmul_precision("medium"), torch.get_float32_matmul_precision),
    "number of threads": (lambda: torch.set_num_threads(7), torch.get_num_threads),
    "autocast on cpu": (lambda: torch.set_autocast_enabled("cpu", True), lambda: torch.is_autocast_enabled("cpu")),
    "current folder": (lambda: os.chdir("/"), os.getcwd),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_plugin_changes_is_put_back_and_told_once(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Also if it raises. The plugin and what it changed are named."""
    change, look = CHANGES[name]
    before = look()
    for _ in range(2):
        with state_kept(f"reward=changes {name}"):
            change()
            assert look() != before
        assert look() == before
    with pytest.raises(PluginError), foreign_code(f"reward=changes {name}"):
        change()
        raise ValueError
    assert look() == before
    told = capsys.readouterr().err
    assert told.count(f"reward=changes {name}: changed") == 1
    assert name in told


def test_what_cannot_be_put_back_is_refused() -> None:
    """A generator that yields inside of torch's inference mode leaves it to its caller, whose tensors could never be trained on."""

    def answers() -> Any:
        with torch.inference_mode():
            yield 1

    generator = answers()
    told = r"rollout=mine: left torch's inference mode at True\. Use it in a `with` that ends before"
    with pytest.raises(PluginError, match=told), state_kept("rollout=mine"):
        next(generator)
    generator.close()
    assert torch.is_grad_enabled()


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (ValueError("no such label"), "raised ValueError: no such label (test_foreign_code.py:"),
        (AssertionError(), "raised AssertionError (test_foreign_code.py:"),
        (Mute(), "raised Mute: its text cannot be shown, as that raises RuntimeError (test"),
        (ValueError("x" * 10**6), "x... (1000000 characters) (test"),
        (SystemExit(0), "raised SystemExit: 0 (test"),
        (KeyboardInterrupt(), "raised KeyboardInterrupt (test"),
        (GeneratorExit(), "raised GeneratorExit (test"),
        (StopIteration(), "raised StopIteration (test"),
        (decimal.InvalidOperation([decimal.ConversionSyntax]), "raised InvalidOperation: ["),
        (ConfigError("my.key=1: no"), "raised ConfigError: my.key=1: no (test"),
    ],
)
def test_whatever_is_raised_names_the_plugin(raised: BaseException, told: str) -> None:
    """And its line, with a text of bounded length; the cause is kept."""
    with pytest.raises(PluginError) as caught, foreign_code("algorithm.loss=mine", on="a pack of 3 tokens"):
        raise raised
    assert str(caught.value).startswith("algorithm.loss=mine: raised ")
    assert told in str(caught.value)
    assert str(caught.value).endswith(" on a pack of 3 tokens. Correct it.")
    assert len(str(caught.value)) < 5000
    assert caught.value.__cause__ is raised


def test_the_plugins_own_line_comes_first() -> None:
    """Where a library raised: the line that called it, and the one that raised."""
    places = r"\(test_foreign_code\.py:\d+, in decoder\.py:\d+\)"
    with pytest.raises(RewardError, match=places), foreign_code("reward=mine", error_type=RewardError):
        json.loads("{")


@pytest.mark.parametrize("ends", [StoppedBySignal(143), Interrupted(), ConfigError("offload.options.fraction=2: at most 1. Lower it.")])
def test_what_is_no_fault_of_the_plugin_passes(ends: BaseException) -> None:
    """A signal that asks the rank to stop, and a message that the plugin wrote itself."""
    with pytest.raises(type(ends)) as caught, foreign_code("offload=mine"):
        raise ends
    assert caught.value is ends


def test_a_context_manager_is_guarded_on_its_way_in_and_out() -> None:
    """What it changes and what it raises; an error of the code inside is not its own, and lets it clean up."""
    seen: list[str] = []

    class Strategy:
        def __enter__(self) -> None:
            torch.set_grad_enabled(False)

        def __exit__(self, kind: Any, *_: object) -> None:
            seen.append(kind and kind.__name__)
            torch.set_default_dtype(torch.float64)
            if kind is None:
                raise KeyError("state")

    with pytest.raises(PluginError, match="offload=mine: raised KeyError: 'state'"), foreign_context("offload=mine", Strategy):
        assert torch.is_grad_enabled()
    assert torch.get_default_dtype() == torch.float32
    with pytest.raises(ZeroDivisionError), foreign_context("offload=mine", Strategy):
        _ = 1 / 0
    torch.set_default_dtype(torch.float32)
    assert seen == [None, "ZeroDivisionError"]
