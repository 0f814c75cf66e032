"""What every rank of a layout would write and read of a checkpoint, of models of any size, on the meta device.

    python -m tests.megatron.save_plan

plans a save of the whole of DeepSeek-V3 by 64 ranks, makes the checkpoint's files without content, plans its load by the ranks of
another layout, and prints both.
"""

from __future__ import annotations

import gc
import math
import os
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from rlbatch.api import ModelFamily
from rlbatch.checkpoint import archive
from rlbatch.checkpoint.torch_dist import Chunk, TorchDist, small_files
from rlbatch.config.schema import LayoutConfig
from rlbatch.megatron.checkpoint_chunks import placed_chunks
from rlbatch.megatron.held_parts import Part, runs, weights, written
from rlbatch.megatron.optimizer import wrap_data_parallel
from rlbatch.megatron.simulated_rank import on_meta, simulated_rank, stages
from rlbatch.megatron.state_writer import buffer_bytes, plan, write_bytes
from rlbatch.weights.codec import CHUNK_BYTES
from rlbatch.weights.filling import THREADS


@dataclass(frozen=True)
class RankPlan:
    """What a rank writes, and what it reads of a checkpoint.

    Attributes:
        chunks: Where each of its parts lies.
        disk_bytes: Of its files.
        host_bytes: What it takes of the host's memory meanwhile.
        weights: What it reads: of the model,
        state: and of the optimizer.
    """

    chunks: list[Chunk]
    disk_bytes: int
    host_bytes: int
    weights: list[Part]
    state: list[Part]


class Shards:
    """A distributed optimizer as far as a checkpoint looks at it: Megatron's division of its buffers, and state without content."""

    def __init__(self, buffers: list[Any]) -> None:
        of_buffers = [of_type for buffer in buffers for of_type in DistributedOptimizer._build_gbuf_range_map(buffer).values()]
        self.model_param_group_index_map = {
            param: ranges for of_buckets in of_buffers for bucket in of_buckets for param, ranges in bucket["param_map"].items()
        }

    def _get_model_param_range_map(self, param: torch.Tensor) -> Any:
        return self.model_param_group_index_map[param]

    def _get_main_param_and_optimizer_states(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        place = self.model_param_group_index_map[param]["param"]
        state = {name: torch.empty(place.end - place.start, device="meta") for name in ("param", "exp_avg", "exp_avg_sq")}
        return {**state, "step": torch.zeros((), device="meta")}


def plans(family: ModelFamily, layout: LayoutConfig, ranks: Iterable[int] | None = None) -> Iterator[RankPlan]:
    """Plans of one rank after the other; None: of all."""
    for rank in range(layout.world_size) if ranks is None else ranks:
        with simulated_rank(layout, rank):
            with on_meta():
                held = stages(family, layout)
                wrapped = wrap_data_parallel(held[0].config, held, overlap=layout.overlap_grad_reduce)
                optimizers = [Shards([b for chunk in wrapped for b in getattr(chunk, n)]) for n in ("buffers", "expert_parallel_buffers")]
                chunks = defaultdict(list)
                for tensor, chunk, _ in (found for stage in held for found in placed_chunks(stage)):
                    chunks[id(tensor)].append(chunk)
                owned = ((run, chunk) for optimizer in optimizers for run in runs(optimizer) for chunk in chunks[id(run.param)])
                state = [part for run, chunk in owned for part in run.parts(chunk)]
                parts, needed = list(written(held, optimizers)), list(weights(held))
            planned = plan(parts, rank)
            yield RankPlan([one.chunk for one in planned], write_bytes(planned), buffer_bytes(planned), needed, state)


def without_content(folder: Path, plans: Iterable[RankPlan]) -> Path:
    """A checkpoint whose files have their sizes and nothing else, and take no room."""
    chunks = [chunk for rank in plans for chunk in rank.chunks]
    ends: dict[str, int] = {}
    for chunk in chunks:
        ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.start + chunk.length)
    for name, end in ends.items():
        (folder / name).touch()
        os.truncate(folder / name, end)
    for name, content in small_files(chunks).items():
        (folder / name).write_bytes(content)
    return folder


def reads(stored: TorchDist, part: Part) -> Iterator[int]:
    """Bytes of each read that fills a part; it takes no more of the host's memory.

    Raises:
        AssertionError: pieces do not have each of its elements once.
    """
    size, itemsize = part.values.shape, part.values.itemsize
    touched = list(stored._grid(part.key).touching(part.start, size))
    assert sum(math.prod(extent) for _, _, extent in touched) == math.prod(size), part
    for chunk, _, extent in touched:
        strides = [math.prod(chunk.sizes[axis + 1 :]) for axis in range(len(extent))]
        for _, sizes in archive._pieces((0,) * len(extent), tuple(extent), strides, CHUNK_BYTES // itemsize):
            yield archive._span(sizes, strides) * itemsize


def _main() -> None:
    from tests.megatron.every_rank import family_of
    from tests.megatron.real_models import PARAMETERS

    warnings.simplefilter("ignore")
    family, parameters, gib = family_of("DeepSeek-V3"), PARAMETERS["DeepSeek-V3"], 2**30
    saving = list(plans(family, LayoutConfig(world_size=64, tp_size=8, pp_size=8, ep_size=8, last_stage_layers=5)))
    sizes, host = [rank.disk_bytes for rank in saving], max(rank.host_bytes for rank in saving)
    files, pieces = len({chunk.file for rank in saving for chunk in rank.chunks}), sum(len(rank.chunks) for rank in saving)
    values = sum(math.prod(chunk.size) * chunk.dtype.itemsize for rank in saving for chunk in rank.chunks)
    print(f"{sum(sizes)} bytes in {files} files and {pieces} parts, {values} of them values, {values / parameters:.4f} a parameter")
    print(f"a rank writes {min(sizes) / 1e9:.1f} to {max(sizes) / 1e9:.1f} GB, with {host / 2**20:.0f} MiB of host memory", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        without_content(Path(folder), saving)
        del saving
        gc.collect()
        before, started = psutil.Process().memory_info().rss, time.perf_counter()
        with TorchDist(Path(folder)) as stored:
            taken, seconds = psutil.Process().memory_info().rss - before, time.perf_counter() - started
            metadata = (Path(folder) / ".metadata").stat().st_size
            print(f".metadata has {metadata / 2**20:.1f} MiB; read in {seconds:.1f} s, it takes {taken / 2**20:.0f} MiB", flush=True)
            most, state, read, needed = 0, 0, [], []
            for rank in plans(family, LayoutConfig(world_size=128, tp_size=4, pp_size=4, ep_size=32, last_stage_layers=13)):
                found = [nbytes for part in (*rank.weights, *rank.state) for nbytes in reads(stored, part)]
                most = max([most, *found])
                read.append(sum(found))
                needed.append(sum(part.values.nbytes for part in (*rank.weights, *rank.state)))
                state += sum(part.values.nbytes for part in rank.state)
    print(f"128 ranks of another layout read {state} bytes of state, {state / parameters:.4f} a parameter")
    print(f"a rank needs {min(needed) / gib:.1f} to {max(needed) / gib:.1f} GiB, and reads {min(read) / gib:.1f} to {max(read) / gib:.1f}")
    print(f"{sum(read) / sum(needed):.2f} times what is needed, {THREADS} x {most / 2**20:.0f} MiB at once")


if __name__ == "__main__":
    _main()
