"""Where the kernels of Triton run: told once where they do not."""

from __future__ import annotations

import logging

import pytest
import torch

from rlbatch.kernels import choice


@pytest.fixture(autouse=True)
def as_before() -> None:
    choice.ask("auto")


@pytest.mark.parametrize(
    ("capability", "said"),
    [
        ((7, 5), "train.kernels=auto: Tesla T4 has compute capability 7.5, and Triton's kernels need 8.0 or more. So log-probs, "),
        ((9, 0), "train.kernels=auto: Triton is not installed in this Python (pip install triton). So log-probs, "),
    ],
)
def test_a_gpu_without_them(
    capability: tuple[int, int], said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The GPU or what lacks by name, the cost, and the switch; once; and nothing where torch's operations were asked for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if capability >= choice.OLDEST else object())
    with caplog.at_level(logging.WARNING):
        assert [choice.takes_triton(), choice.takes_triton()] == [False, False]
        (record,) = caplog.records
        assert record.getMessage().startswith(said)
        assert "three times as long. train.kernels=torch asks for that" in record.getMessage()
        choice.ask("torch")
        assert not choice.takes_triton()
    assert len(caplog.records) == 1


def test_a_gpu_that_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless torch's operations are asked for; CPUs take none."""
    assert not choice.takes_triton()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    choice.ask("auto")
    assert choice.takes_triton()
    choice.ask("torch")
    assert not choice.takes_triton()
