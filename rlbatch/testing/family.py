"""The command ``python -m rlbatch.testing.family``: tells whether a model family computes what transformers computes. See ``--help``."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlbatch.api import ConfigError, ModelFamily, RlbatchError
from rlbatch.api.exit_codes import FAILED, REFUSED
from rlbatch.config.hf_config import read_config
from rlbatch.config.schema import LayoutConfig
from rlbatch.launch.ranks.rank_info import check_trainer
from rlbatch.plan.layout import check_expert_widths, check_layout
from rlbatch.registry import load_plugins

HELP = """\
Compares a model family with transformers, on this machine's CPUs, in fp32: a tiny model with random weights.

Usage: python -m rlbatch.testing.family <folder> [plugins=[path/to/family.py,...]] [<field>=<value> ...]

  <folder>          a Hugging Face folder; its config.json is enough. Sizes are made small, what else it says stays.
  plugins=[...]     as of rlbatch.submit: where the family is, if it is not installed.
  <field>=<value>   a field of config.json, in JSON: num_hidden_layers=6, rope_scaling=null.

What is compared, and the largest difference that passes:
  logits            of a pack of four sequences with transformers', at every token                              1e-4
  gradients         of a GRPO loss with transformers' autograd, of every parameter (relative L2)                1e-4
  export            names and values of the checkpoint that comes back, each tensor once                        bitwise
  round trip        checkpoint -> Megatron -> checkpoint -> Megatron                                            bitwise
  tp2, ep2, ...     gradients under layouts of two ranks with those of one process                              1e-5
A layout that the family cannot have is shown with the reason, and is no failure.

Exit codes: 0 all agree, 1 something differs or fails, 2 the config or the arguments are refused.
"""
TINY = {
    **{"vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "head_dim": 16, "max_position_embeddings": 128, "first_k_dense_replace": 1, "max_window_layers": 4},
    **{"n_routed_experts": 8, "num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2},
    **{"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    **{"num_nextn_predict_layers": 0, "num_mtp_layers": 0, "n_shared_experts": 1},
}
"""The largest sizes of a tiny model."""
DROPPED = ("quantization_config", "torch_dtype", "dtype", "pad_token_id", "bos_token_id", "eos_token_id")
"""Fields of config.json about the file's weights and tokens, which a tiny model does not have."""
TOLERANCE, LAYOUT_TOLERANCE = 1e-4, 1e-5
ONE = LayoutConfig(world_size=1)
LAYOUTS = {
    "tp2": LayoutConfig(world_size=2, tp_size=2, etp_size=2),
    "ep2": LayoutConfig(world_size=2, ep_size=2),
    "pp2": LayoutConfig(world_size=2, pp_size=2),
    "cp2": LayoutConfig(world_size=2, cp_size=2),
}


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        name: What was compared.
        result: ``ok``, ``BAD``, or ``-`` where it cannot be.
        said: The largest difference, or why there is none.
    """

    name: str
    result: str
    said: str


def main(arguments: Sequence[str]) -> int:
    """Runs the command, with a folder, then ``key=value``, and returns its exit code."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(HELP, end="")
        return 0 if arguments else REFUSED
    try:
        folder, plugins, changes = _parse(arguments)
        check_trainer("rlbatch.testing.family")
        registry = load_plugins(plugins)
        config = tiny_config(read_config(folder), changes)
        family = registry.resolve_model_family(config)
        check_expert_widths(family, "fp32", on_gpu=False)
    except RlbatchError as error:
        print(error, file=sys.stderr)
        return REFUSED
    print(f"{family.name}: {family.num_layers} layers, {family.num_experts} experts, {family.vocab_size} tokens; config.json of {folder}")
    failed = False
    for row in _rows(config, family, plugins):
        print(f"  {row.result:<4} {row.name:<12} {row.said}", flush=True)
        failed |= row.result == "BAD"
    return FAILED if failed else 0


def tiny_config(hf_config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json of the same model with small sizes, but for ``changes``."""
    config = {name: value for name, value in hf_config.items() if name not in DROPPED}
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    for name, most in TINY.items():
        if isinstance(value := config.get(name), int) and not isinstance(value, bool):
            config[name] = min(value, most)
    if isinstance(groups, int):
        config["num_key_value_heads"] = config.get("num_attention_heads") if groups == heads else min(groups, 2)
    layers = changes.get("num_hidden_layers", config.get("num_hidden_layers"))
    if isinstance(config.get("layer_types"), list):
        config["layer_types"] = config["layer_types"][:layers]
    if isinstance(config.get("mlp_only_layers"), list):
        config["mlp_only_layers"] = [layer for layer in config["mlp_only_layers"] if isinstance(layer, int) and layer < layers]
    return config | dict(changes)


def _parse(arguments: Sequence[str]) -> tuple[Path, tuple[str, ...], dict[str, Any]]:
    folder, *pairs = arguments
    plugins: tuple[str, ...] = ()
    changes: dict[str, Any] = {}
    for pair in pairs:
        name, separator, text = pair.partition("=")
        if not separator:
            raise ConfigError(f"{pair}: must be <field>=<value>. See --help.")
        if name == "plugins":
            plugins = tuple(part.strip() for part in text.removeprefix("[").removesuffix("]").split(",") if part.strip())
            continue
        try:
            changes[name] = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f'{pair}: must be JSON ({error}). Write text in quotes: {name}="text".') from None
    return Path(folder), plugins, changes


def _rows(config: Mapping[str, Any], family: ModelFamily, plugins: tuple[str, ...]) -> Iterator[Row]:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # of the ranks
    warnings.simplefilter("ignore")
    from rlbatch.rank_pools import RankPools

    pools = RankPools()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            yield from _compared(config, family, plugins, Path(scratch), pools)
    finally:
        pools.close()


def _compared(
    config: Mapping[str, Any], family: ModelFamily, plugins: tuple[str, ...], scratch: Path, pools: Callable[[int], Any]
) -> Iterator[Row]:
    import torch

    from rlbatch.checkpoint.hf import HfTensors
    from rlbatch.testing.gradients import layout_gradients, worst
    from rlbatch.testing.hugging_face import gradients_of, random_model, saved
    from rlbatch.testing.parity import forward_and_export, round_trip, sequences

    vocab, folder = family.vocab_size, scratch / "model"
    try:
        model = random_model(config, scratch / "config")
        saved(model, folder)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        with torch.no_grad():
            want = [model(tokens[None]).logits[0] for tokens in sequences(vocab)]
    except Exception as error:  # whatever transformers says to this config
        yield Row("transformers", "BAD", _first_line(error))
        return
    try:
        [(got, exported)] = pools(1).run(forward_and_export, str(folder), ONE, vocab, plugins)
        again = pools(1).run(round_trip, str(folder), str(scratch / "again"), ONE, plugins)[0]
        [alone] = pools(1).run(layout_gradients, str(folder), ONE, vocab, plugins)
    except Exception as error:
        yield Row("Megatron", "BAD", _first_line(error))
        return
    largest = max(float((ours[:, :vocab] - theirs).abs().max()) for ours, theirs in zip(got, want, strict=True))
    yield _measured("logits", largest, TOLERANCE, f"logits up to {max(float(theirs.abs().max()) for theirs in want):.3g}")
    autograds = gradients_of(model, scratch / "gradients", "token_mean", vocab)
    largest, where = worst({**alone, "loss": autograds["loss"]}, {name: autograds[name] for name in alone})  # see _spread
    yield _measured("gradients", largest, TOLERANCE, f"largest at {where}")
    source = HfTensors(folder)
    differing = [name for name, tensor in exported if name not in source.names() or not torch.equal(tensor, source.read(name))]
    missing = set(source.names()) - {name for name, _ in exported}
    yield _listed("export", [*differing, *missing], f"{len(exported)} tensors, bitwise")
    yield _listed("round trip", again, "bitwise")
    yield from _spread(family, plugins, folder, pools, alone)


def _spread(
    family: ModelFamily, plugins: tuple[str, ...], folder: Path, pools: Callable[[int], Any], alone: Mapping[str, Any]
) -> Iterator[Row]:
    """Rows that compare the gradients under each layout that the family can have with those of one rank."""
    from rlbatch.testing.gradients import layout_gradients, worst

    for title, layout in LAYOUTS.items():
        spread = layout if family.num_experts else LayoutConfig(**{**vars(layout), "etp_size": 1})
        try:
            check_layout(spread, family, on_gpu=False)
        except ConfigError as refusal:
            yield Row(title, "-", str(refusal))
            continue
        try:
            got = pools(spread.world_size).run(layout_gradients, str(folder), spread, family.vocab_size, plugins)[0]
        except Exception as error:
            yield Row(title, "BAD", _first_line(error))
            continue
        largest, where = worst({**got, "loss": alone["loss"]}, dict(alone))  # the loss is a sum of terms that cancel
        yield _measured(title, largest, LAYOUT_TOLERANCE, f"largest at {where}")


def _measured(name: str, error: float, limit: float, about: str) -> Row:
    return Row(name, "ok" if error <= limit else "BAD", f"{error:.1e} (at most {limit:.0e}); {about}")


def _listed(name: str, wrong: Sequence[str], right: str) -> Row:
    return Row(name, "BAD", f"{len(wrong)} differ or are missing, first {sorted(wrong)[0]}") if wrong else Row(name, "ok", right)


def _first_line(error: Exception) -> str:
    """Shows the last line of a rank's traceback, which says what it was."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1].strip() if lines else ''}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
