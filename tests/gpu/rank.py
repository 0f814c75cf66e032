"""One rank of ``tests.gpu.compare``."""

from __future__ import annotations

import sys

import torch

from rlbatch.config.schema import LayoutConfig
from rlbatch.launch.environment import RankInfo


def main() -> None:
    """Computes the gradients of the test batch; rank 0 writes them."""
    folder, layout_text, precision, result = sys.argv[1:]
    layout = eval(layout_text, {"LayoutConfig": LayoutConfig})  # written by compare.py
    from rlbatch.launch.process_group import process_group
    from tests.megatron.gradients import gradients

    with process_group(RankInfo.from_environment()):
        named = gradients(folder, layout, 40, "token_mean", precision=precision)
        if named:
            torch.save({name: tensor.cpu() for name, tensor in named.items()}, result)


if __name__ == "__main__":
    main()
