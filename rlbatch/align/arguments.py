"""Reads the options of a comparison from ``key=value`` arguments, and layouts from their names."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from rlbatch.api import ConfigError, Count, DataError, ModelFamily, Range
from rlbatch.api.values import FilePath, PathRule
from rlbatch.config.arguments import key_table, parse_keys
from rlbatch.config.bounded_files import read_text
from rlbatch.config.keys import key
from rlbatch.config.schema import LayoutConfig
from rlbatch.config.structured import MISSING_VALUE, show_value
from rlbatch.plan.layout import check_layout

JOB_KEYS = ("launcher", "cluster", "cluster_dir", "run_dir", "follow")
"""Keys of ``rlbatch.submit`` that turn a comparison into a job, beside ``cluster.*`` and ``launch.*``."""

SIZES = ("tp", "pp", "vpp", "cp", "ep", "etp")
TRANSFORMER_ENGINE = "te"
"""Part of a layout's name that selects Transformer Engine's layers."""
INTRODUCTION = """\
Says where models diverge that should compute the same: the first module that differs by more than rounding, what kind of difference it is,
and how that is known. The same tokens go through transformers in fp32, which is the baseline, and through each other side.

Usage: python -m rlbatch.align hf=<folder> [key=value ...]

Sides, on this machine's processors, or in a job:
  transformers         the folder, in fp32: the baseline
  trainer              the trainer, under each of layouts, with its local layers or Transformer Engine's
  engines              rollout backends such as vllm and sglang, with the folder's weights: sequences that they sample, of the same
                       lengths and first tokens; their log-probs, and their experts if they tell them
  beside=<folder>      another checkpoint of the same model, in transformers in the place of the trainer

Examples:
  python -m rlbatch.align hf=/models/tiny layouts=[ep1,ep2,tp2+ep2]
  python -m rlbatch.align hf=/models/tiny engines=[vllm] 'engine={vllm: {python: .venv-vllm/bin/python}}'
  python -m rlbatch.align hf=/models/tiny beside=/models/exported out=align.html
  python -m rlbatch.align hf=/models/large layouts=[tp4+ep16] +cluster=h20x16 launcher=slurm follow=true

Keys of rlbatch.submit that make it a job, with a run folder: launcher, +cluster, cluster.*, cluster_dir, launch.*, run_dir, follow.
What is rounding is measured: transformers in the precision of a side beside transformers in more bits, times 10.
Exit codes: 0 all agree, or the job is submitted, 1 a side differs or did not run, 2 refused: arguments, folders, layouts, tokens.

Keys (key=value):
"""


@dataclass(frozen=True)
class Options:
    """The options of the command ``python -m rlbatch.align``."""

    hf: FilePath = key(MISSING_VALUE, "Hugging Face folder of the model.")
    beside: FilePath = key("", "Another folder, to be compared with hf by weights and by what both compute in transformers.")
    layouts: tuple[str, ...] = key(
        ("ep1",),
        "Layouts of the trainer: sizes joined by +, e.g. tp2+ep2; the others are 1, ranks as many as that takes. With `te`, e.g. "
        "te+ep2, its layers are Transformer Engine's (bf16, on GPUs), else the local ones.",
    )
    engines: tuple[str, ...] = key((), "Rollout backends.")
    engine: Mapping[str, Any] = key({}, "Of each of them what a run has as rollout.engine: python, environment, the engine's own options.")
    precision: Literal["fp32", "bf16"] = key("fp32", "Arithmetic of the trainer and of engines.")
    lengths: tuple[Count, ...] = key((9, 17, 1, 12), "Tokens of random sequences.")
    seed: Annotated[int, Range(least=0, most=2**31)] = key(0, "Of the random tokens.")
    tokens: FilePath = key("", "File with a JSON list of token ids a line, in the place of random ones.")
    gradients: bool = key(True, "Compare gradients too, of the first layout with those of the others.")
    out: FilePath = key("", "HTML page to write; in a job, if empty: <run_dir>/align.html.")
    plugins: tuple[Annotated[str, PathRule(suffix=".py")], ...] = key(
        (), "Extra plugins (model families): python files or importable modules."
    )


def parse(arguments: Sequence[str]) -> Options:
    """Reads the options from the command's arguments.

    Raises:
        ConfigError: an argument is no key=value, a key is unknown, a value is wrong, or options contradict each other.
    """
    options, given = parse_keys(Options, arguments, JOB_KEYS)
    if options.hf == MISSING_VALUE:
        raise ConfigError("hf=: has no value. Give the model's folder: hf=<folder>.")
    if options.beside and "layouts" in given:
        raise ConfigError("layouts: not used with beside=, which compares two checkpoints in transformers. Leave one of them out.")
    if options.beside and options.engines:
        raise ConfigError("engines: not used with beside=, which compares two checkpoints in transformers. Leave one of them out.")
    for name, own in options.engine.items():
        if name not in options.engines or not isinstance(own, Mapping):
            raise ConfigError(
                f"engine.{name}={show_value(own)}: must be options of one of engines. Write engine={{<name>: {{python: <path>}}}}."
            )
    if options.out and not Path(options.out).resolve().parent.is_dir():
        raise ConfigError(f"out={options.out}: its folder is not there. Make it, or choose another path.")
    if not options.layouts and not options.engines:
        raise ConfigError("layouts=[]: must name at least one, or engines must. Use layouts=[ep1].")
    return options


def help_text() -> str:
    """Text that ``--help`` prints."""
    return INTRODUCTION + key_table(Options)


def layouts_of(options: Options, family: ModelFamily) -> dict[str, LayoutConfig]:
    """The trainer's layouts by name; raises ConfigError as ``layout_of``."""
    return {} if options.beside else {name: layout_of(name, family) for name in options.layouts}


def layout_parts(name: str) -> set[str]:
    """The parts of a layout's name: ``tp2+ep2`` has ``tp2`` and ``ep2``."""
    return set(name.split("+"))


def spec_of(name: str) -> Literal["local", "transformer_engine"]:
    """Value of ``train.spec`` that a layout's name stands for."""
    return "transformer_engine" if TRANSFORMER_ENGINE in layout_parts(name) else "local"


def layout_of(name: str, family: ModelFamily) -> LayoutConfig:
    """The layout that a name such as ``tp2+ep2`` stands for.

    Raises:
        ConfigError: a part of the name is no size, or the model cannot have the layout.
    """
    sizes: dict[str, Any] = dict.fromkeys(SIZES, 1)
    for part in layout_parts(name) - {TRANSFORMER_ENGINE}:
        match = re.fullmatch(rf"({'|'.join(SIZES)})([1-9]\d{{0,5}})", part)
        if match is None:
            raise ConfigError(
                f"layouts=[{name}]: `{part}` is no size. Join {', '.join(f'{size}<n>' for size in SIZES)} or {TRANSFORMER_ENGINE} by +, "
                "e.g. tp2+ep2."
            )
        sizes[match[1]] = int(match[2])
    if "etp" not in name and sizes["ep"] == 1 and family.num_experts:
        sizes["etp"] = sizes["tp"]
    dense, experts = sizes["tp"] * sizes["pp"] * sizes["cp"], sizes["etp"] * sizes["ep"] * sizes["pp"]
    layout = LayoutConfig(world_size=math.lcm(dense, experts), **{f"{size}_size": number for size, number in sizes.items()})
    try:
        check_layout(layout, family, on_gpu=False)
    except ConfigError as error:
        raise ConfigError(f"layouts=[{name}]: {error}") from None
    return layout


def token_lists(options: Options, family: ModelFamily) -> list[list[int]]:
    """The sequences of token ids that are compared.

    Raises:
        ConfigError: there is no sequence, or one is longer than the model's context.
        DataError: a line of ``tokens`` is no list of the model's token ids.
    """
    if options.tokens:
        found = _read_tokens(Path(options.tokens), family)
    else:
        import random

        draw = random.Random(options.seed)
        found = [[draw.randrange(family.vocab_size) for _ in range(length)] for length in options.lengths]
    what = f"tokens={options.tokens}" if options.tokens else f"lengths=[{','.join(map(str, options.lengths))}]"
    if not found:
        raise ConfigError(f"{what}: has no sequence. Give at least one.")
    if (longest := max(map(len, found))) > family.max_sequence_length:
        raise ConfigError(f"{what}: a sequence of {longest} tokens, the model's context is {family.max_sequence_length}. Use shorter ones.")
    return found


def _read_tokens(path: Path, family: ModelFamily) -> list[list[int]]:
    found = []
    for number, line in enumerate(read_text(path, "Give a file with a JSON list of token ids a line.").splitlines(), 1):
        try:
            tokens = json.loads(line)
        except (ValueError, RecursionError):
            tokens = None
        is_right = isinstance(tokens, list) and tokens and all(type(token) is int and 0 <= token < family.vocab_size for token in tokens)
        if not is_right:
            raise DataError(f"{path}:{number}: must be a JSON list of token ids below {family.vocab_size}. Correct the line.")
        found.append(tokens)
    return found
