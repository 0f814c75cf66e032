"""Lines of code that hold a GPU's memory, from what torch's allocator tells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rlbatch.metrics.memory_owners import BEFORE, largest_owners, memory_snapshot

TORCH = str(Path(torch.__file__).parent / "nn/functional.py")
MLP = "/usr/lib/python3.12/site-packages/megatron/core/transformer/mlp.py"


def block(size: int, *frames: tuple[str, int, str], state: str = "active_allocated") -> dict[str, Any]:
    return {"size": size, "state": state, "frames": [dict(zip(("filename", "line", "name"), frame, strict=True)) for frame in frames]}


def test_the_innermost_line_that_is_not_torchs_owns_a_block() -> None:
    """Blocks of one line are one owner; what is free is nobody's; what was there before has no line."""
    loss = ((TORCH, 5, "linear"), (MLP, 140, "forward"), ("/home/me/run.py", 3, "main"))
    segments = [
        {"blocks": [block(300, *loss), block(500, (TORCH, 9, "backward")), block(9000, *loss, state="inactive")]},
        {
            "blocks": [
                block(400, *loss),
                block(200),
                {"size": 50, "state": "active_allocated"},
                block(100, ("/home/me/rewards.py", 7, "loss")),
            ]
        },
    ]
    assert largest_owners({"segments": segments}) == [
        ("megatron/core/transformer/mlp.py:140 forward", 700),
        ("backward passes of torch's own", 500),
        (BEFORE, 250),
        ("home/me/rewards.py:7 loss", 100),
    ]
    assert [size for _, size in largest_owners({"segments": segments}, most=2)] == [700, 500]


def test_an_allocator_that_says_nothing() -> None:
    """As on CPUs: the error that is to be explained counts more."""
    assert largest_owners({}) == []
    if not torch.cuda.is_available():
        assert largest_owners(memory_snapshot()) == []
