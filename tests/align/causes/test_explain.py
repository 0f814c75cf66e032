"""Faults are named: the first module that differs, and what kind of difference it is; without a fault nothing is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rlbatch.align.causes import case, explain, parts
from rlbatch.align.report.answer import Answer, answer
from rlbatch.align.report.compare import rounding
from rlbatch.align.sides.transformers import TransformersSide
from rlbatch.align.values.places import Batch, Place, Trace, batch_of
from rlbatch.api import ModelFamily
from rlbatch.config.hf_config import read_config
from rlbatch.registry import load_plugins
from tests import tiny_models
from tests.align.causes.blind_faults import BLIND_FAULTS
from tests.align.causes.faults import FAULTS, Fault
from tests.tiny_models import saved

Baseline = tuple[Path, ModelFamily, Trace, dict[Place, float]]


@pytest.fixture(scope="module")
def batch() -> Batch:
    """Sequences of 9, 17, 1 and 12 tokens below 61."""
    return batch_of([[(7 * place * place + 3 * length) % 61 for place in range(length)] for length in (9, 17, 1, 12)])


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory, batch: Batch) -> Callable[[str], Baseline]:
    """A model by name, as a folder, and what transformers computes of it."""
    made: dict[str, Baseline] = {}

    def of(name: str) -> Baseline:
        if name not in made:
            folder = saved(getattr(tiny_models, name)(), tmp_path_factory.mktemp(name))
            right = TransformersSide(folder).compute(batch)
            made[name] = folder, load_plugins().resolve_model_family(read_config(folder)), right, rounding(folder, batch, right, "fp32")
        return made[name]

    return of


def asked(baseline: Baseline, batch: Batch, side: TransformersSide) -> Answer:
    _, family, right, limits = baseline
    return answer(family, batch, side, right, side.compute(batch), limits)


ALL = FAULTS | BLIND_FAULTS
FIRST = {(fault.kind, fault.place[1]): name for name, fault in reversed(ALL.items())}
"""One fault of each kind at each place; the others are of the long tail."""
CASES = [pytest.param(fault, id=name, marks=() if name in FIRST.values() else pytest.mark.long("align")) for name, fault in ALL.items()]


@pytest.mark.parametrize("fault", CASES)
def test_each_fault_is_named(fault: Fault, baseline: Callable[[str], Baseline], batch: Batch) -> None:
    """Module, layer and kind."""
    model = baseline(fault.model)
    found = asked(model, batch, TransformersSide(model[0], change=fault.put))
    assert found.first is not None
    assert found.explanation is not None
    said = found.sentence(4)
    assert found.first.place == fault.place, said
    assert found.explanation.kind == fault.kind, said
    assert fault.words in said


@pytest.mark.parametrize(
    ("fault", "words"),
    [("temperature", "divided by 0.7"), ("log-probs of a filter", "top-k of 20"), ("rope theta", "Kind: not located")],
)
def test_a_side_that_shows_only_its_end(fault: str, words: str, baseline: Callable[[str], Baseline], batch: Batch) -> None:
    """As engines do: what the output layer alone explains is named, anything else could be anywhere."""
    folder, family, right, limits = baseline("qwen3_moe")
    side = TransformersSide(folder, change=FAULTS[fault].put)
    shown = Trace({(4, "logprobs"): side.compute(batch).values[4, "logprobs"]})
    assert words in answer(family, batch, side, right, shown, limits).sentence(4)


def test_an_explanation_that_fails(baseline: Callable[[str], Baseline], batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """For want of memory, say: where the difference is is told all the same."""
    model, fault = baseline("qwen3_moe"), FAULTS["rope theta"]
    monkeypatch.setattr(parts, "of_parts", lambda case: torch.empty(2**60))
    monkeypatch.setitem(explain.OF_PLACE, fault.place[1], explain.no_causes)
    found = asked(model, batch, TransformersSide(model[0], change=fault.put))
    assert found.first is not None
    assert found.first.place == fault.place
    assert "Kind: unknown: looking for an explanation failed. How that is known: RuntimeError" in found.sentence(4)


def test_experts_that_this_host_does_not_take(baseline: Callable[[str], Baseline], batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not computed otherwise: the job would end for want of memory."""
    model, fault = baseline("deepseek_v3"), FAULTS["gate and up used swapped"]
    monkeypatch.setattr(case, "host_memory", lambda: (2**30, 2**10))
    found = asked(model, batch, TransformersSide(model[0], change=fault.put))
    assert found.first is not None
    assert found.first.place == fault.place
    assert fault.words not in found.sentence(4)


def test_what_rounding_may_change(baseline: Callable[[str], Baseline], batch: Batch) -> None:
    """In bf16 a place may differ nearly as much as a fault makes it: where that begins is said beside the fault."""
    folder, family, right, _ = baseline("qwen3_moe")
    side = TransformersSide(folder, "bf16", change=FAULTS["experts exchanged"].put)
    said = answer(family, batch, side, right, side.compute(batch), rounding(folder, batch, right, "bf16")).sentence(4)
    assert "layer 2: the MLP is the first to differ" in said
    assert "its experts are in another order: 1, 2, 3" in said
    assert "on rounding may change all" in said


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "moonlight", "mixtral", "qwen2", "qwen3"])
def test_what_is_right_is_no_fault(name: str, baseline: Callable[[str], Baseline], batch: Batch) -> None:
    """The same model again."""
    found = asked(baseline(name), batch, TransformersSide(baseline(name)[0]))
    assert found.first is None
    assert "agrees everywhere up to rounding" in found.sentence(4)
