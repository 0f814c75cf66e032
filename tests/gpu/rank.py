"""One rank of ``tests.gpu.compare``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from tests.gpu.layouts import LAYOUTS
from tests.gpu.torchrun import process_group


def main() -> None:
    """Computes the gradients of the test batch under each layout; rank 0 writes them."""
    folder, results, precisions, *names = sys.argv[1:]
    from rlbatch.testing.gradients import gradients

    with process_group():
        for name in names:
            for precision in precisions.split(","):
                named = gradients(folder, LAYOUTS[name], 40, "token_mean", precision=precision, spec="local")
                if named:
                    torch.save({key: tensor.cpu() for key, tensor in named.items()}, Path(results) / f"{name}.{precision}.pt")


if __name__ == "__main__":
    main()
