"""A run goes on only from its own checkpoints; what may change is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlbatch.api import Prompt
from rlbatch.checkpoint.identity import announced_changes, identity, prompts_identity, refused_changes
from rlbatch.config.schema import Config, DataConfig, LayoutConfig, OptimizerConfig, TrainConfig

MODEL = {"model_type": "qwen3_moe", "hidden_size": 64, "transformers_version": "5.0", "rope_scaling": None}
PROMPTS = [Prompt(0, "a", (1,), label="x"), Prompt(1, "b", (2,), label=["y"], metadata={"level": 3})]
CONFIG = Config()
OWN = identity(CONFIG, MODEL, prompts_identity(PROMPTS))


def changes(config: Config = CONFIG, model: dict[str, object] = MODEL, prompts: list[Prompt] = PROMPTS) -> tuple[list[str], list[str]]:
    """(refused, announced) of a run that differs."""
    now = identity(config, model, prompts_identity(prompts))
    return refused_changes(OWN, now), announced_changes(OWN, now)


def test_an_equal_run_goes_on_silently() -> None:
    """Also with more steps, another run folder, other checkpoint settings, and files that were moved."""
    moved = replace(CONFIG, run_dir="elsewhere", resume="auto", data=DataConfig(train="moved.jsonl"), train=TrainConfig(steps=7))
    assert changes() == ([], [])
    assert changes(replace(moved, checkpoint=replace(moved.checkpoint, keep=5, save_interval=1))) == ([], [])
    assert changes(model={**MODEL, "transformers_version": "6"}) == ([], [])


def test_the_layout_may_change() -> None:
    """With the old and the new value of every key."""
    assert changes(replace(CONFIG, layout=LayoutConfig(world_size=4, ep_size=2))) == (
        [],
        ["layout.ep_size was 1, is 2", "layout.world_size was 2, is 4"],
    )


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (replace(CONFIG, optimizer=OptimizerConfig(lr=0.5)), "optimizer.lr was 1e-06, is 0.5"),
        (replace(CONFIG, train=TrainConfig(prompts_per_step=16)), "train.prompts_per_step was 32, is 16"),
    ],
)
def test_hyperparameters_may_change(config: Config, text: str) -> None:
    """The place in the prompts counts prompts, not steps."""
    assert changes(config) == ([], [text])


@pytest.mark.parametrize(
    ("changed", "texts"),
    [
        ({"config": replace(CONFIG, seed=3)}, ["seed was 0, is 3"]),
        ({"config": replace(CONFIG, train=TrainConfig(precision="bf16"))}, ["train.precision was fp32, is bf16"]),
        (
            {"model": {"model_type": "qwen3_moe", "hidden_size": 32, "num_experts": 8, "rope_scaling": None}},
            ["model hidden_size was 64, is 32", "model num_experts was absent, is 8"],
        ),
        ({"prompts": PROMPTS[:1]}, ["data.train prompts was 2, is 1", "data.train sha256 was "]),
        ({"prompts": PROMPTS[::-1]}, ["data.train sha256 was "]),
        ({"prompts": [PROMPTS[0], replace(PROMPTS[1], label="z")]}, ["data.train sha256 was "]),
        ({"prompts": [PROMPTS[0], replace(PROMPTS[1], metadata={"level": 4})]}, ["data.train sha256 was "]),
    ],
)
def test_another_run_is_refused(changed: dict[str, object], texts: list[str]) -> None:
    """Model, prompts (number, order and content), seed and precision, each with both values."""
    refused, _ = changes(**changed)
    assert len(refused) == len(texts)
    assert all(got.startswith(want) for got, want in zip(refused, texts, strict=True)), refused
