"""The command: the trainer beside transformers, a checkpoint beside another, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rlbatch.align import __main__ as command
from rlbatch.align.arguments import help_text, layout_of
from rlbatch.align.report.answer import answer
from rlbatch.align.report.compare import rounding
from rlbatch.align.sides.trainer import Task, TrainerSide, Written, compute
from rlbatch.align.sides.transformers import TransformersSide
from rlbatch.align.values.places import batch_of
from rlbatch.config.hf_config import read_config
from rlbatch.rank_pools import RankPools
from rlbatch.registry import load_plugins
from tests import tiny_models
from tests.tiny_models import saved

WRONG = """
from dataclasses import replace
from rlbatch.api import hookimpl
from rlbatch_plugins.model_qwen3_moe import qwen3_moe

@hookimpl(tryfirst=True)
def rlbatch_resolve_model_family(hf_config):
    return replace(qwen3_moe(hf_config), rotary_base=9000.0) if hf_config.get("model_type") == "qwen3_moe" else None
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DeepSeek-like model."""
    return saved(tiny_models.deepseek_v3(), tmp_path_factory.mktemp("deepseek"))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE."""
    return saved(tiny_models.qwen3_moe(), tmp_path_factory.mktemp("qwen"))


@pytest.fixture(autouse=True)
def _warm_pools(rank_pool: RankPools, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command takes the session's processes, and leaves them."""
    monkeypatch.setattr("rlbatch.rank_pools.RankPools", lambda: Kept(rank_pool))


class Kept:
    """Pools that outlive the command."""

    def __init__(self, pools: RankPools) -> None:
        self._pools = pools

    def __call__(self, world_size: int) -> Any:
        return self._pools(world_size)

    def close(self) -> None:
        """They go on."""


def test_the_trainer_agrees_under_every_layout(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With all places of all layers, and gradients with those of one process; the page shows each side."""
    page = tmp_path / "align.html"
    code = command.main([f"hf={folder}", "layouts=[ep1,ep2,tp2+ep2,cp2,pp2]", f"out={page}"])
    said = capsys.readouterr().out
    assert code == 0, said
    assert said.count("agrees everywhere up to rounding") == 5
    assert said.count("gradients agree") == 4
    assert page.read_text().count("<polyline") == 5


def test_layers_of_transformer_engine_are_named_or_missed(qwen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where they cannot be, that side says what is missing, and the local one beside it agrees."""
    code = command.main([f"hf={qwen}", "layouts=[ep1,te+ep1]", "precision=bf16"])
    said = capsys.readouterr().out
    assert code == 1
    assert "trainer ep1 bf16: agrees everywhere up to rounding" in said
    [missed] = [line for line in said.splitlines() if line.startswith("trainer te+ep1 bf16: did not run: ")]
    assert "train.spec=transformer_engine: it needs a GPU, and this rank has 0." in missed


def test_a_wrong_family_is_named(qwen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plugin that rotates by another base."""
    (tmp_path / "wrong.py").write_text(WRONG)
    code = command.main([f"hf={qwen}", f"plugins=[{tmp_path / 'wrong.py'}]"])
    said = capsys.readouterr().out
    assert code == 1
    assert "layer 0: attention's queries (projected, normalised and rotated) is the first to differ" in said
    assert "Kind: rotary position: rotary base (theta) is about 9000, not 1e+04" in said


def scaled(task: Task) -> Written:
    """The trainer with another softmax scale in layer 2."""
    return compute(task, change=scale_layer)


def scale_layer(trainer: Any) -> None:
    for stage in trainer.stages:
        for layer in stage.decoder.layers:
            if layer.layer_number == 3:
                layer.self_attention.core_attention.scale *= 1.3


def test_a_fault_in_the_trainer_is_named_under_a_layout(folder: Path, rank_pool: Callable[[int], Any]) -> None:
    """Where it is on one of two pipeline stages with tensor parallelism."""
    family, batch = load_plugins().resolve_model_family(read_config(folder)), batch_of([list(range(11)), list(range(30, 50))])
    layout = layout_of("tp2+ep2", family)
    side = TrainerSide("tp2+ep2", Task(str(folder), layout, "fp32", ()), partial(rank_pool(layout.world_size).run, scaled))
    baseline = TransformersSide(folder).compute(batch)
    found = answer(family, batch, side, baseline, side.compute(batch), rounding(folder, batch, baseline, "fp32"))
    assert found.first is not None
    assert found.first.place == (2, "context")
    assert "1.3 times the products" in found.sentence(4)


def test_a_checkpoint_beside_another(qwen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One layer of it was not saved anew."""
    model = tiny_models.qwen3_moe()
    with torch.no_grad():
        for parameter in model.base_model.layers[1].self_attn.parameters():  # type: ignore[union-attr, operator]
            parameter.mul_(1.001)
    other = saved(model, tmp_path / "other")
    assert command.main([f"hf={qwen}", f"beside={other}"]) == 1
    said = capsys.readouterr().out
    assert "layer 1: attention's queries" in said
    assert "model.layers.1.self_attn.q_proj.weight is 1.001 times what it should be" in said
    assert "all in model.layers.1" in said


def test_given_tokens(qwen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the place of random ones."""
    (tmp_path / "tokens.jsonl").write_text("[1, 2, 3]\n[60]\n")
    assert command.main([f"hf={qwen}", f"beside={qwen}", f"tokens={tmp_path / 'tokens.jsonl'}"]) == 0
    assert "agrees everywhere" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["layouts=[ep1]"], "hf=: has no value."),
        (["hf=absent"], "absent/config.json: not there."),
        (["hf={qwen}", "layouts=[xp2]"], "layouts=[xp2]: `xp2` is no size."),
        (["hf={qwen}", "layouts=[ep3]"], "layouts=[ep3]: layout.ep_size=3: must divide"),
        (["hf={qwen}", "layouts=[]"], "layouts=[]: must name at least one, or engines must."),
        (["hf={qwen}", "beside={folder}"], "is another model than"),
        (["hf={qwen}", "beside={qwen}", "layouts=[ep2]"], "layouts: not used with beside="),
        (["hf={qwen}", "lengths=[129]"], "lengths=[129]: a sequence of 129 tokens, the model's context is 128."),
        (["hf={qwen}", "lengths=[]"], "lengths=[]: has no sequence."),
        (["hf={qwen}", "tokens={tokens}"], "tokens.jsonl:2: must be a JSON list of token ids below 61."),
        (["hf={qwen}", "out=/absent/page.html"], "out=/absent/page.html: its folder is not there."),
        (["hf={qwen}", "precision=fp8"], "precision=fp8"),
        (["hf={qwen}", "layout=[ep1]"], "layout"),
        (["verbose"], "`verbose`: not of the form key=value."),
    ],
)
def test_refusals(arguments: list[str], message: str, folder: Path, qwen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One message, exit code 2."""
    tokens = tmp_path / "tokens.jsonl"
    tokens.write_text(json.dumps([1, 2]) + "\n[61]\n")
    assert command.main([argument.format(folder=folder, qwen=qwen, tokens=tokens) for argument in arguments]) == 2
    assert message in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    """Names every key."""
    assert command.main(["--help"]) == 0
    assert capsys.readouterr().out.strip() == help_text().strip()
