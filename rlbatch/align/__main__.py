"""Runs the command ``python -m rlbatch.align``; see ``--help``."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rlbatch.align.arguments import Options, help_text, layouts_of, parse, token_lists
from rlbatch.align.job.submit import split, submit
from rlbatch.api import ConfigError, ModelFamily, RlbatchError
from rlbatch.api.exit_codes import FAILED, REFUSED
from rlbatch.config.hf_config import read_config
from rlbatch.launch.ranks.rank_info import check_trainer
from rlbatch.plan.layout import check_expert_widths
from rlbatch.registry import Registry, load_plugins


def main(arguments: Sequence[str]) -> int:
    """Runs the command with arguments ``key=value`` or ``--help``, and returns its exit code."""
    if {"-h", "--help"} & set(arguments):
        print(help_text())
        return 0
    try:
        own, of_job = split(arguments)
        options = parse(own)
        check_trainer("rlbatch.align")
        registry = load_plugins(options.plugins)
        family = registry.resolve_model_family(read_config(Path(options.hf)))
        for name in options.engines:
            registry.rollouts.named(name, "engines")
        _check(options, family, registry)
        layouts = layouts_of(options, family)
        token_lists(options, family)
        if of_job:
            return submit(options, family, layouts, of_job)
    except RlbatchError as error:
        print(error, file=sys.stderr)
        return REFUSED
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # of the ranks
    warnings.simplefilter("ignore")
    from rlbatch.align.report.compare import report
    from rlbatch.align.sides.trainer import Task, Written, compute
    from rlbatch.rank_pools import RankPools

    def run(task: Task) -> list[Written]:
        return pools(task.layout.world_size).run(compute, task)

    pools = RankPools()
    try:
        return 0 if report(options, family, run, registry, partial(print, flush=True)) else FAILED
    except RlbatchError as error:
        print(error, file=sys.stderr)
        return FAILED
    finally:
        pools.close()


def _check(options: Options, family: ModelFamily, registry: Registry) -> None:
    from rlbatch.checkpoint.hf import HfTensors
    from rlbatch.weights.coverage import check_names

    check_expert_widths(family, options.precision, on_gpu=False)
    if options.beside:
        other = registry.resolve_model_family(read_config(Path(options.beside)))
        for what in ("name", "num_layers", "num_experts", "vocab_size"):
            ours, theirs = getattr(family, what), getattr(other, what)
            if ours != theirs:
                raise ConfigError(
                    f"beside={options.beside}: is another model than hf={options.hf}: its {what} is {theirs}, not {ours}. "
                    "Give a checkpoint of the same."
                )
    for name, folder in (("hf", options.hf), ("beside", options.beside)):
        if not folder:
            continue
        if "quantization_config" in read_config(Path(folder)):
            raise ConfigError(
                f"{name}={folder}: its weights are quantised, transformers would compute with them on GPUs alone. "
                "Convert it: python -m rlbatch.convert mode=fp8_to_bf16."
            )
        check_names(family, HfTensors(Path(folder)).names())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
