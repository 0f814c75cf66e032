"""The command ``python -m rlbatch.align``; see ``--help``."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from rlbatch.align.arguments import Options, help_text, layout_of, parse, token_lists
from rlbatch.api import ConfigError, ModelFamily, RlbatchError
from rlbatch.api.exit_codes import FAILED, REFUSED
from rlbatch.config.hf_config import read_config
from rlbatch.launch.ranks.rank_info import check_trainer
from rlbatch.plan.layout import check_expert_widths
from rlbatch.registry import load_plugins


def main(arguments: Sequence[str]) -> int:
    """Runs the command.

    Args:
        arguments: ``key=value``, or ``--help``.

    Returns:
        The exit code.
    """
    if {"-h", "--help"} & set(arguments):
        print(help_text())
        return 0
    try:
        options = parse(arguments)
        check_trainer("rlbatch.align")
        registry = load_plugins(options.plugins)
        family = registry.resolve_model_family(read_config(Path(options.hf)))
        for name in options.engines:
            registry.rollouts.named(name, "engines")
        _check(options, family)
        layouts = {} if options.beside else {name: layout_of(name, family) for name in options.layouts}
        tokens = token_lists(options, family)
    except RlbatchError as error:
        print(error, file=sys.stderr)
        return REFUSED
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # of the ranks
    warnings.simplefilter("ignore")
    from rlbatch.align.answer import Answer
    from rlbatch.align.sides import Failed, compared
    from rlbatch.testing.ranks import RankPools

    answers, is_right, pools = [], True, RankPools()
    try:
        for found in compared(options, family, layouts, tokens, pools, registry):
            if isinstance(found, Answer):
                answers.append(found)
                is_right &= found.first is None
                print("\n".join([found.sentence(family.num_layers), *found.table(family.num_layers), ""]), flush=True)
            elif isinstance(found, Failed):
                is_right = False
                print(f"{found.title}: did not run: {found.reason}", flush=True)
            else:
                is_right &= " DIFFER " not in found
                print(found, flush=True)
    except RlbatchError as error:
        print(error, file=sys.stderr)
        return FAILED
    finally:
        pools.close()
    if options.out:
        from rlbatch.align.page import write_page

        write_page(Path(options.out), f"{family.name}: {options.hf}", answers, family.num_layers)
        print(f"{options.out}: curves over layers, tokens by their difference")
    return 0 if is_right else FAILED


def _check(options: Options, family: ModelFamily) -> None:
    from rlbatch.checkpoint.hf import HfTensors
    from rlbatch.weights.coverage import check_names

    check_expert_widths(family, options.precision, on_gpu=False)
    if options.beside:
        other = load_plugins(options.plugins).resolve_model_family(read_config(Path(options.beside)))
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
