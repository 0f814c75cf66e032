"""Options of a conversion, from ``key=value`` arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from rlbatch.api import ConfigError, Count, CountOrZero, Range
from rlbatch.config.arguments import key_table, parse_keys
from rlbatch.config.keys import Ranks, key
from rlbatch.config.schema import LayoutConfig
from rlbatch.config.structured import MISSING_VALUE

MODES = {
    "hf_to_dist": "a Hugging Face folder (bf16, fp32 or block-quantised fp8) to a torch_dist checkpoint",
    "dist_to_hf": "a torch_dist checkpoint to a Hugging Face folder",
    "fp8_to_bf16": "a block-quantised Hugging Face folder to one in bf16",
    "bf16_to_fp8": "a Hugging Face folder to a block-quantised one",
    "check": "whether a Hugging Face folder has every tensor of its model, from config.json and names alone",
}
INTRODUCTION = """\
Converts checkpoints tensor by tensor: no GPU, no process group and no model in memory.

Usage: python -m rlbatch.convert mode=<mode> hf=<folder> [out=<folder>] [key=value ...]
Alone, or with any number of processes under srun, mpirun or torchrun, each of which takes a share.

Modes:
{modes}

Examples:
  python -m rlbatch.convert mode=check hf=/models/DeepSeek-R1
  python -m rlbatch.convert mode=hf_to_dist hf=/models/Qwen3-30B-A3B out=/models/Qwen3-30B-A3B_torch_dist verify=true
  srun -n 32 python -m rlbatch.convert mode=hf_to_dist hf=/models/DeepSeek-R1 out=/models/DeepSeek-R1_torch_dist \\
      layout.pp_size=8 layout.ep_size=4 layout.first_stage_layers=7 layout.last_stage_layers=6
  python -m rlbatch.convert mode=dist_to_hf dist=runs/one/checkpoints/step_000100 hf=/models/Qwen3-30B-A3B out=/models/trained

A conversion that was killed goes on where it was when it is started again with the same arguments.
Exit codes: 0 done (check: complete), 1 failed, e.g. the disk became full (check: not complete), 2 refused: arguments, source, layout, room.

Keys (key=value):
"""


@dataclass(frozen=True)
class LayoutOptions:
    """``layout.*``: for which ranks a torch_dist checkpoint is cut. Any layout can load it; its own loads without cutting anew."""

    world_size: CountOrZero = key(0, "Ranks; 0: the fewest that the other sizes allow.")
    tp_size: Ranks = key(1, "Tensor parallel size of attention and dense layers.")
    pp_size: Ranks = key(1, "Pipeline stages.")
    vpp_size: Ranks = key(1, "Model chunks of a pipeline stage.")
    ep_size: Ranks = key(1, "Expert parallel size.")
    etp_size: Ranks = key(1, "Tensor parallel size of experts.")
    first_stage_layers: Count | None = key(None, "Layers of the first pipeline stage; null: an equal share.")
    last_stage_layers: Count | None = key(None, "Layers of the last pipeline stage; null: an equal share.")


@dataclass(frozen=True)
class Options:
    """All keys of the command."""

    mode: Literal["hf_to_dist", "dist_to_hf", "fp8_to_bf16", "bf16_to_fp8", "check"] = key(MISSING_VALUE, "What to do; see above.")
    hf: str = key("", "Hugging Face folder: the source, or for dist_to_hf where config, tokenizer and untrained tensors come from.")
    dist: str = key("", "For dist_to_hf: the source, a torch_dist folder or a run's checkpoint (.../step_000100).")
    out: str = key("", "Folder to make; it must not exist. Until it is complete it is called <out>.part.")
    names: str = key("", "For check: a table of tensors instead of hf's index: json or json.gz, {name: {shape, dtype}} or an index.")
    export: Literal["auto", "bf16", "fp8"] = key(
        "auto", "For dist_to_hf: type of the weights; auto: of each as in hf, or where that has no weights, as it is stored."
    )
    verify: bool = key(False, "After writing, read everything again, convert the source again, and compare.")
    finite: bool | None = key(
        None, "Refuse weights that are infinite or NaN; null: as verify. For check: read all weights for that, and for zeros."
    )
    file_gb: Annotated[float, Range(above=0, most=1e6)] = key(
        5.0, "Most GB (1e9 bytes) of an output file; a larger tensor has a file of its own."
    )
    plugins: tuple[str, ...] = key((), "Extra plugins (model families): python files or importable modules.")
    layout: LayoutOptions = field(default_factory=LayoutOptions)


def parse(arguments: Sequence[str]) -> Options:
    """Options from arguments.

    Raises:
        ConfigError: an argument that is no key=value, an unknown key, a wrong value, or a combination that makes no sense.
    """
    options, _ = parse_keys(Options, arguments)
    _check(options)
    return options


def layout_config(options: LayoutOptions) -> LayoutConfig:
    """The layout to cut for, with its number of ranks."""
    dense, experts = options.tp_size * options.pp_size, options.etp_size * options.ep_size * options.pp_size
    chosen = vars(options) | {"world_size": options.world_size or math.lcm(dense, experts)}
    return LayoutConfig(**chosen)


def help_text() -> str:
    """What ``--help`` prints."""
    return INTRODUCTION.format(modes="\n".join(f"  {name:<13}{words}" for name, words in MODES.items())) + key_table(Options)


def _check(options: Options) -> None:
    if options.mode not in MODES:
        raise ConfigError(f"mode=: has no value. Choose {', '.join(MODES)}.")
    needed = {"hf": True, "out": options.mode != "check", "dist": options.mode == "dist_to_hf"}
    for name, is_needed in needed.items():
        if is_needed and not getattr(options, name):
            raise ConfigError(f"{name}=: mode={options.mode} needs it. Give a folder: {name}=<folder>.")
        if not is_needed and getattr(options, name):
            raise ConfigError(f"{name}={getattr(options, name)}: mode={options.mode} does not use it. Leave it out.")
    if options.names and options.mode != "check":
        raise ConfigError(f"names={options.names}: only mode=check uses it. Leave it out.")
    if options.export != "auto" and options.mode != "dist_to_hf":
        raise ConfigError(f"export={options.export}: only mode=dist_to_hf uses it. Leave it out.")
    if options.layout != LayoutOptions() and options.mode != "hf_to_dist":
        raise ConfigError("layout.*: only mode=hf_to_dist uses it. Leave it out.")
    out = Path(options.out).resolve()
    for name in ("hf", "dist"):
        folder = Path(getattr(options, name) or "/").resolve()
        if options.out and getattr(options, name) and (out in (folder, *folder.parents) or folder in out.parents):
            raise ConfigError(f"out={options.out}: and {name}={getattr(options, name)} lie in each other. Choose another folder.")
