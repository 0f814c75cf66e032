"""Parameters: of whole models exactly as published, of stages and ranks so that each is counted once."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from itertools import product

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlbatch.api import ConfigError
from rlbatch.config.schema import LayoutConfig
from rlbatch.plan.layout import check_layout, stage_chunks, stage_ends
from rlbatch.plan.parameters import ModelSize, least_share
from rlbatch.registry import load_plugins
from tests.megatron.real_models import CONFIGS, PARAMETERS

REGISTRY = load_plugins()
SIZES = {name: ModelSize(REGISTRY.resolve_model_family(config)) for name, config in CONFIGS.items()}

ACTIVE = {
    "DeepSeek-V3": 37_552_282_624,
    "Moonlight-16B-A3B": 2_914_774_528,
    "Qwen3-235B-A22B": 22_190_763_520,
    "Qwen3-30B-A3B": 3_353_032_704,
    "Mixtral-8x7B": 12_879_925_248,
    "Mixtral-8x22B": 39_161_468_928,
}
"""Of models with experts, as transformers counts them."""
OTHERS = {
    "Qwen3-4B": ("Qwen3-8B", {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True}),
    "Qwen2.5-0.5B": (
        "Qwen2.5-7B",
        {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "vocab_size": 151936,
        },
    ),
    "Mixtral-8x22B-v0.1": ("Mixtral-8x22B", {"vocab_size": 32000}),
    "Qwen3-Coder-480B-A35B, 4 layers": (
        "Qwen3-235B-A22B",
        {
            "hidden_size": 6144,
            "intermediate_size": 8192,
            "moe_intermediate_size": 2560,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "num_experts": 160,
            "num_hidden_layers": 4,
            "qkv_bias": False,
            "shared_expert_intermediate_size": 0,
            "use_qk_norm": True,
        },
    ),
    "Kimi-K2, 4 layers": (
        "DeepSeek-V3",
        {
            "first_k_dense_replace": 1,
            "n_group": 1,
            "n_routed_experts": 384,
            "num_attention_heads": 64,
            "num_hidden_layers": 4,
            "num_key_value_heads": 64,
            "num_nextn_predict_layers": 0,
            "topk_group": 1,
            "vocab_size": 163840,
        },
    ),
    "some layers without experts": (
        "Qwen3-30B-A3B",
        {"num_hidden_layers": 12, "decoder_sparse_step": 2, "mlp_only_layers": [3, 7], "tie_word_embeddings": True},
    ),
    "no dense layer, 4 shared experts": ("DeepSeek-V3", {"num_hidden_layers": 4, "first_k_dense_replace": 0, "n_shared_experts": 4}),
    "no shared expert": ("DeepSeek-V3", {"num_hidden_layers": 4, "n_shared_experts": 0}),
    "no experts": ("DeepSeek-V3", {"num_hidden_layers": 3}),
}
"""Other models of the same families: of which one, and what is different."""


def layouts(name: str) -> Iterator[LayoutConfig]:
    """All that are accepted, of these sizes, for the model; stages are uneven where they must be."""
    family = SIZES[name].family
    for tp, pp, vpp, ep, etp, more in product((1, 2, 4), (1, 2, 4, 7), (1, 2), (1, 8), (1, 2), (1, 2)):
        first, last = (stage_ends(pp, family.num_layers) or (None, None)) if pp > 1 else (None, None)
        world = pp * max(tp, ep * etp) * more
        sizes = {"tp_size": tp, "pp_size": pp, "vpp_size": vpp, "ep_size": ep, "etp_size": etp}
        layout = LayoutConfig(world_size=world, first_stage_layers=first, last_stage_layers=last, **sizes)
        try:
            check_layout(layout, family, on_gpu=True)
        except ConfigError:
            continue
        yield layout


@pytest.mark.parametrize("name", PARAMETERS)
def test_as_published(name: str) -> None:
    """Every one, without the layers that are carried; of these DeepSeek-V3 has one."""
    assert SIZES[name].total.total == PARAMETERS[name]
    assert SIZES[name].active == ACTIVE.get(name, PARAMETERS[name])
    assert SIZES[name].carried.total == (11_610_046_464 if name == "DeepSeek-V3" else 0)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_as_transformers_builds_it(name: str) -> None:
    """All, and those that a token meets, from the same config.json."""
    base, changes = OTHERS[name]
    fields = deepcopy({**CONFIGS[base], **changes})  # transformers completes nested ones where they lie
    size = ModelSize(REGISTRY.resolve_model_family(fields))
    config = AutoConfig.for_model(**{field: value for field, value in fields.items() if field != "quantization_config"})
    with torch.device("meta"):
        named = dict(AutoModelForCausalLM.from_config(config).named_parameters())
    routed = sum(parameter.numel() for field, parameter in named.items() if ".experts." in field)
    idle = 1 - config.num_experts_per_tok / size.family.num_experts if routed else 0
    assert size.total.total == sum(parameter.numel() for parameter in named.values())
    assert size.total.experts == routed
    assert size.active == size.total.total - routed * idle


@pytest.mark.parametrize("name", PARAMETERS)
def test_each_is_counted_once(name: str) -> None:
    """Stages together are the model, and so is what the optimizers of all ranks own, but for an embedding that is there twice."""
    size, tried = SIZES[name], 0
    for layout in layouts(name):
        tried += 1
        assert sum(part.total for stage in size.stages(layout) for part in stage) == PARAMETERS[name]
        tp, copied = layout.tp_size, size.family.tie_embeddings and layout.pp_size > 1
        whole = sum(part.whole for stage in size.stages(layout) for part in stage)  # on each tensor parallel rank
        twice = whole * (tp - 1) + copied * size.family.vocab_size * size.family.transformer["hidden_size"]
        owned = sum(share.owned for share in size.shares(layout)) * layout.world_size / layout.pp_size
        assert owned == pytest.approx(PARAMETERS[name] + twice, rel=1e-9)
        copies = layout.world_size / layout.pp_size / (layout.ep_size * layout.etp_size)
        of_all = sum(share.experts for share in size.shares(layout)) * layout.world_size / layout.pp_size
        assert of_all == size.total.experts * copies
    assert tried > 10


@pytest.mark.parametrize("name", PARAMETERS)
def test_what_is_counted_of_an_unknown_model_is_less(name: str) -> None:
    """From the number alone at most the mean of what ranks have, under any layout."""
    for layout in layouts(name):
        shares, least = SIZES[name].shares(layout), least_share(PARAMETERS[name], layout)
        for field in ("held", "owned", "last_buffer"):
            mean = sum(getattr(share, field) for share in shares) / len(shares)
            assert getattr(least, field) <= mean * (1 + 1e-9), (field, layout)


def test_stages_of_an_interleaved_pipeline() -> None:
    """Chunks go around the stages: of 27 layers the first has no experts, and is in the first stage's first chunk of 3."""
    layout = LayoutConfig(world_size=3, pp_size=3, vpp_size=3)
    assert stage_chunks(layout, 27)[1] == (range(3, 6), range(12, 15), range(21, 24))
    chunks = [part for stage in SIZES["Moonlight-16B-A3B"].stages(layout) for part in stage]
    assert [part.experts / chunks[1].experts for part in chunks] == [2 / 3, *[1] * 8]
    assert [part.vocabulary > 0 for part in chunks] == [True, *[False] * 7, True]
