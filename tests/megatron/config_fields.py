"""Config.jsons with one unusual field, and how far a model's logits are from what transformers computes for each.

``python -m tests.megatron.config_fields [family ...]`` tries many values of every field (minutes); the test tries those that are nothing.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.utils import logging

from rlbatch.api import ModelError
from rlbatch.api.hf_fields import MEANINGLESS
from rlbatch.config.schema import LayoutConfig
from rlbatch.megatron.logits import logits
from rlbatch.pipeline.bare_trainer import build_trainer, plugins_of
from rlbatch.pipeline.packing import split_by_sample
from rlbatch.plan.layout import check_expert_widths
from rlbatch.rank_pools import RankPool
from rlbatch.testing.parity import pack_of, sequences
from tests import tiny_models
from tests.plugins.model_cases import as_json

FAMILIES = ("deepseek_v3", "llama", "mixtral", "qwen2", "qwen3", "qwen3_moe")
ABSENT = "absent"
NOTHING = (ABSENT, None, False, 0, "", [])
OTHERS = (0.0, {}, True, 1, 2, 3, 8, 0.5, -1, "x", [0], {"a": 1})
OUTSIDE = (
    *("head_dim", "is_causal", "layer_types", "max_window_layers", "mlp_only_layers", "moe_layer_freq", "num_experts", "num_local_experts"),
    *("num_mtp_layers", "num_nextn_predict_layers", "original_max_position_embeddings", "partial_rotary_factor", "quantization_config"),
    *("qk_head_dim", "rope_parameters", "rope_scaling", "rope_theta", "scoring_func", "sliding_window", "topk_method", "use_qk_norm"),
)
"""Fields that some config.json has and transformers does not write for every family."""
INSIDE = (
    *("attention_factor", "beta_fast", "beta_slow", "factor", "mscale", "mscale_all_dim", "original_max_position_embeddings"),
    *("partial_rotary_factor", "rope_theta", "rope_type", "truncate", "type"),
)
"""Fields of rope_parameters."""
TOLERANCE = 2e-4
ONE = LayoutConfig(world_size=1)


def changed_configs(base: dict[str, Any], values: Sequence[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What was changed, and the config.json."""
    for name in sorted({*base, *OUTSIDE} - MEANINGLESS):
        for value in values:
            if not name.startswith("_"):
                yield f"{name}={value!r}", _changed(base, name, value)
    for name in INSIDE:
        for value in values:
            yield f"rope_parameters.{name}={value!r}", base | {"rope_parameters": _changed(base["rope_parameters"], name, value)}


def _changed(content: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    kept = {key: old for key, old in content.items() if key != name}
    return kept if value is ABSENT else kept | {name: value}


def differences(base: dict[str, Any], configs: list[dict[str, Any]]) -> list[float | str | None]:
    """What one rank finds: for each config None if the family refuses it, the largest difference of a logit, or what fails."""
    resolve = plugins_of().resolve_model_family
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    usual, model = resolve(base), _model(_read(base))
    tokens = sequences(base["vocab_size"])
    known = _logits(model, tokens)
    found: list[float | str | None] = []
    for config in configs:
        found.append(None)
        with contextlib.suppress(ModelError):
            family = resolve(config)
            check_expert_widths(family, "fp32", on_gpu=False)
            try:
                theirs = _read(config)
                if theirs.to_dict() == model.config.to_dict() and family == usual:
                    found[-1] = 0.0
                else:
                    short = [sequence % config["vocab_size"] for sequence in tokens]
                    want = _logits(built := _model(theirs), short)
                    got = known if family == usual else _megatrons(built, config, short)
                    found[-1] = max(float((ours - theirs).abs().max()) for ours, theirs in zip(got, want, strict=True))
            except Exception as error:  # whatever it is: the family should have refused the config
                found[-1] = f"{type(error).__name__}: {error}"
    return found


def _megatrons(model: torch.nn.Module, config: dict[str, Any], tokens: list[torch.Tensor]) -> list[torch.Tensor]:
    """Logits with the same weights."""
    with tempfile.TemporaryDirectory() as folder:
        tiny_models.saved(model, Path(folder))
        (Path(folder) / "config.json").write_text(json.dumps(config))
        pack = pack_of(tokens, ONE)
        return split_by_sample([pack], [logits(build_trainer(Path(folder), ONE), pack.microbatch)])


def _read(config: dict[str, Any]) -> PretrainedConfig:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return AutoConfig.from_pretrained(folder)


def _model(config: PretrainedConfig) -> torch.nn.Module:
    return tiny_models.scrambled(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))


def _logits(model: torch.nn.Module, tokens: list[torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(sequence[None]).logits[0] for sequence in tokens]


def base_config(family: str) -> dict[str, Any]:
    """Of a tiny model of two layers, with all that transformers writes."""
    return as_json(getattr(tiny_models, family)(num_hidden_layers=2).config)


def main(families: Sequence[str]) -> int:
    """Tries many values of every field."""
    from tests.megatron.config_fields import differences  # a rank cannot import it from this program

    pool, wrong = RankPool(1), 0
    for family in families or FAMILIES:
        base = base_config(family)
        cases = list(changed_configs(base, (*NOTHING, *OTHERS)))
        (found,) = pool.run(differences, base, [config for _, config in cases], timeout_s=1800)
        accepted = [(what, result) for (what, _), result in zip(cases, found, strict=True) if result is not None]
        bad = [(what, result) for what, result in accepted if isinstance(result, str) or not result < TOLERANCE]
        print(*(f"{family} {what}: {result}" for what, result in bad), sep="\n")
        print(f"{family}: {len(cases)} configs, {len(accepted)} accepted, {len(bad)} differ or fail", flush=True)
        wrong += len(bad)
    pool.close()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
