"""Ranks write what they have, in boxes of bounded size: together everything, once. Runs of elements are boxes of arrays."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from rlbatch.checkpoint.torch_dist import Chunk, TorchDist
from rlbatch.config.schema import LayoutConfig
from rlbatch.megatron import held_parts
from rlbatch.megatron.checkpoint_chunks import ParameterChunk
from rlbatch.megatron.held_parts import PART_BYTES, boxes, divided, parts
from rlbatch.megatron.state_writer import FILE_BYTES
from rlbatch.plan.parameters import ModelSize
from rlbatch.registry import load_plugins
from rlbatch.weights.codec import CHUNK_BYTES
from tests.megatron.real_models import CONFIGS
from tests.megatron.save_plan import RankPlan, plans, reads, without_content

STATE = ("param", "exp_avg", "exp_avg_sq")
DATA_BYTES = 2 + 3 * 4
"""Of a parameter in bf16, its main weight and moments."""


@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 3, 4), (1, 3, 1, 5), (1,), ()])
def test_a_run_is_few_boxes(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Any run: its elements in order, in less than two boxes a dimension, which divide into ones of bounded size."""
    elements = list(itertools.product(*map(range, shape)))
    for first, end in itertools.combinations_with_replacement(range(len(elements) + 1), 2):
        found = list(boxes(first, end, shape))
        assert len(found) <= max(1, 2 * len(shape) - 1)
        for most in (1, 3, 100):
            monkeypatch.setattr(held_parts, "PART_BYTES", 4 * most)
            small = [part for box in found for part in divided(box, 4)]
            assert all(math.prod(size) <= most for _, size in small)
            inside = [itertools.product(*(range(at, at + n) for at, n in zip(*box, strict=True))) for box in small]
            assert list(itertools.chain(*inside)) == elements[first:end]


@pytest.mark.parametrize("limit", [8, 64, 2**20])
def test_runs_of_a_cut_parameter_make_the_tensor(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stack of experts whose gate and up halves lie apart in the checkpoint, in memory of a larger buffer, cut into runs anywhere."""
    monkeypatch.setattr(held_parts, "PART_BYTES", limit)
    whole, draw = torch.full((2, 8, 6, 5), torch.nan), random.Random(limit)
    for layer, experts in itertools.product(range(2), (0, 4)):
        parameter = torch.randn(4 * 6 * 5 + 11)[7:-4].view(4, 6, 5)
        halves = [
            ParameterChunk("experts", (4, 6, 5), (0, row, 0), (4, 3, 5), "key", (2, 8, 6, 5), (layer, experts, row, 0)) for row in (0, 3)
        ]
        cuts = [0, *sorted(draw.sample(range(1, 120), 3)), 120]
        for (first, end), half in itertools.product(itertools.pairwise(cuts), halves):
            for part in parts(parameter.view(-1)[first:end], first, half, "key"):
                assert part.shape == whole.shape
                assert part.values.nbytes <= limit
                place = whole[tuple(slice(at, at + size) for at, size in zip(part.start, part.values.shape, strict=True))]
                assert place.isnan().all()
                place.copy_(part.values)
        assert whole[layer, experts : experts + 4].equal(parameter)


def check(model: dict[str, object], layout: LayoutConfig) -> list[RankPlan]:
    """Plans of all ranks, of which every element of every tensor is in exactly one part."""
    family = load_plugins().resolve_model_family(model)
    ranks = list(plans(family, layout))
    assert len(ranks) == layout.world_size
    chunks: dict[str, list[Chunk]] = defaultdict(list)
    for rank in ranks:
        assert rank.host_bytes <= PART_BYTES + 2**25
        for chunk in rank.chunks:
            assert math.prod(chunk.size) * chunk.dtype.itemsize <= PART_BYTES
            assert chunk.start + chunk.length <= FILE_BYTES
            chunks[chunk.key].append(chunk)
    draw, trained, buffers = random.Random(0), 0, 0
    for key, found in chunks.items():
        [shape] = {chunk.shape for chunk in found}
        assert sum(math.prod(chunk.size) for chunk in found) == math.prod(shape), key
        for _ in range(5):
            point = [draw.randrange(size) for size in shape]
            holding = [chunk for chunk in found if all(o <= p < o + n for p, o, n in zip(point, chunk.offset, chunk.size, strict=True))]
            assert len(holding) == 1, f"{key} at {point}"
        if not key.startswith("optimizer."):
            is_trained = {f"optimizer.state.{name}.{key}" for name in STATE} <= chunks.keys()
            trained, buffers = trained + is_trained * math.prod(shape), buffers + (not is_trained) * math.prod(shape) * 4
    assert trained == ModelSize(family).total.total
    data = sum(math.prod(chunk.size) * chunk.dtype.itemsize for rank in ranks for chunk in rank.chunks)
    assert data == DATA_BYTES * trained + buffers
    return ranks


def test_64_ranks_write_deepseek_v3(tmp_path: Path) -> None:
    """Its shapes in 5 of 61 layers, under tensor, pipeline, expert and data parallelism: what ranks write is the state's bytes, in boxes of
    bounded size; none writes much more than another of its stage. Under another layout ranks find all that they need in it, each element
    once, and read it in bounded memory.
    """
    model = {**CONFIGS["DeepSeek-V3"], "num_hidden_layers": 5}
    ranks = check(model, LayoutConfig(world_size=64, tp_size=4, pp_size=2, ep_size=16, first_stage_layers=3))
    for stage in (ranks[:32], ranks[32:]):
        sizes = [sum(chunk.length for chunk in rank.chunks) for rank in stage]
        assert max(sizes) < 1.3 * sum(sizes) / len(sizes)
    other = LayoutConfig(world_size=96, tp_size=2, pp_size=3, ep_size=8, first_stage_layers=1, last_stage_layers=2)
    with TorchDist(without_content(tmp_path, ranks)) as stored:
        for rank in plans(load_plugins().resolve_model_family(model), other, range(1, 96, 19)):
            assert rank.state
            assert sum(part.values.numel() for part in rank.weights) > sum(part.values.numel() for part in rank.state) / len(STATE)
            read = [nbytes for part in (*rank.weights, *rank.state) for nbytes in reads(stored, part)]
            assert max(read) <= CHUNK_BYTES
            assert sum(read) < 2 * sum(part.values.nbytes for part in (*rank.weights, *rank.state))
