"""Routers: nothing but the policy's loss moves them, and the biases of experts keep their precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlbatch.checkpoint.hf import HfTensors
from tests import tiny_models
from tests.megatron.router import biases_in_bf16, built_with, changed_after_building


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.saved(tiny_models.deepseek_v3(), tmp_path_factory.mktemp("deepseek_v3"))


@pytest.mark.parametrize(
    ("argument", "value"), [("moe_z_loss_coeff", 1e-3), ("moe_input_jitter_eps", 0.01), ("moe_expert_capacity_factor", 1.0)]
)
def test_what_a_family_may_not_ask_for(argument: str, value: Any, folder: Path, rank_pool) -> None:
    """A family's argument that would move a router beside the policy's loss, or drop tokens, stops the job at its start, by name."""
    (message,) = rank_pool(1).run(built_with, str(folder), {argument: value})
    assert message.startswith("decoder.layers.1.mlp.router: was built with ")
    assert f"{argument}={value!r}" in message


def test_balancing_that_a_family_asks_for_is_not_built(folder: Path, rank_pool) -> None:
    """Balancing loss, bias update and router precision are those of reinforcement learning, whatever a family says."""
    asked = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1, "moe_router_bias_update_rate": 1e-3}
    assert rank_pool(1).run(built_with, str(folder), asked) == [""]


@pytest.mark.parametrize(
    ("name", "value"),
    [("moe_aux_loss_coeff", 0.1), ("moe_router_bias_update_rate", 1e-3), ("moe_router_dtype", None), ("hidden_dropout", 0.1)],
)
def test_what_was_built_is_checked(name: str, value: Any, folder: Path, rank_pool) -> None:
    """The check looks at the modules: a model that was built otherwise is refused."""
    (message,) = rank_pool(1).run(changed_after_building, str(folder), name, value)
    assert f"{name}={value!r}" in message


def test_biases_of_experts_stay_fp32_in_a_bf16_model(folder: Path, rank_pool) -> None:
    """Not a bit is lost between the checkpoint, the routers of a bf16 model and the export: rounded, other experts would be chosen."""
    ((inside, exported),) = rank_pool(1).run(biases_in_bf16, str(folder))
    source = HfTensors(folder)
    assert len(inside) == len(exported) == 3
    for name, tensor in exported.items():
        kept = inside[f"decoder.layers.{name.split('.')[2]}.mlp.router.expert_bias"]
        assert tensor.dtype == kept.dtype == torch.float32
        assert tensor.equal(source.read(name))
        assert tensor.equal(kept)
        assert not tensor.equal(tensor.bfloat16().float())
