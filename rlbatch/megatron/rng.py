"""Saves and restores the random-number states of a rank: Python's, NumPy's, torch's, the GPU's, and Megatron's model-parallel ones."""

from __future__ import annotations

import io
import random

import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor


def seed_random_numbers(seed: int, rank: int) -> None:
    """Seeds this process's generators, for any code that draws from them, such as a reward. Megatron seeds its own."""
    random.seed(f"rank {rank} of seed {seed}")
    np.random.seed((seed + rank) % 2**32)
    torch.manual_seed(seed + rank)


def rng_states() -> Tensor:
    """All states as bytes, [n] uint8 on the host."""
    name, keys, *rest = np.random.get_state()
    states = {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "megatron": get_cuda_rng_tracker().get_states(),
    }
    buffer = io.BytesIO()
    torch.save(states, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def set_rng_states(data: Tensor) -> None:
    """Restores the states of ``rng_states``; the GPU's only if there is one."""
    states = torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    get_cuda_rng_tracker().set_states(states["megatron"])
