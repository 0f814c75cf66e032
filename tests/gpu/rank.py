"""One rank of ``tests.gpu.compare``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from rlbatch.launch.environment import RankInfo
from tests.gpu.layouts import LAYOUTS


def main() -> None:
    """Computes the gradients of the test batch under each layout; rank 0 writes them."""
    folder, results, precisions, *names = sys.argv[1:]
    from rlbatch.launch.job_store import open_store
    from rlbatch.launch.process_group import process_group
    from tests.megatron.gradients import gradients

    with process_group(open_store(RankInfo.from_environment(), 300.0), 600.0):
        for name in names:
            for precision in precisions.split(","):
                named = gradients(folder, LAYOUTS[name], 40, "token_mean", precision=precision)
                if named:
                    torch.save({key: tensor.cpu() for key, tensor in named.items()}, Path(results) / f"{name}.{precision}.pt")


if __name__ == "__main__":
    main()
