"""Gradient errors of every layout in tests/megatron/test_gradients.py, as a Markdown table: ``python -m benchmarks.gradient_errors``.

One fp32 process is the reference; the other processes run on gloo. From the source folder, with the dev extras.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack, closing
from pathlib import Path

from rlbatch.config.schema import LayoutConfig
from rlbatch.rank_pools import RankPool
from rlbatch.testing.gradients import gradients, worst
from tests import tiny_models
from tests.megatron.test_gradients import LAYOUTS

MAX_TOKENS = 40


def main() -> None:
    with ExitStack() as stack:
        folder = tiny_models.saved(tiny_models.qwen3_moe(), Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model")
        pools = {size: stack.enter_context(closing(RankPool(size))) for size in (1, 2, 4)}
        (reference,) = pools[1].run(gradients, str(folder), LayoutConfig(world_size=1), 1000, "token_mean")
        print("| layout | ranks | largest relative L2 error of a parameter's gradient | parameter |\n|---|---|---|---|")
        for name, layout in LAYOUTS.items():
            error, where = worst(pools[layout.world_size].run(gradients, str(folder), layout, MAX_TOKENS, "token_mean")[0], reference)
            print(f"| {name} | {layout.world_size} | {error:.1e} | `{where}` |", flush=True)


if __name__ == "__main__":
    main()
