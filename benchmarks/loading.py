"""A start's loading against ``dd``: ``python -m benchmarks.loading [ranks=2] [gigabytes=1] [rounds=2] [folder=/tmp]``.

A Qwen3-MoE of one layer and random weights, whose experts the ranks divide, is written as a Hugging Face folder of so many GB, and its
state (weights, main weights and moments: seven times as much) as a checkpoint. Each is read in turn by as many ``dd`` (``iflag=direct``),
which divide the files' bytes, and by the ranks as at a start, with what that checks; nothing of it is in the page cache before. Prints
GB/s of both, the share of ``dd``'s, processor seconds of a rank, what the fullest took of memory beyond what it fills, and how much of the
files is in the page cache afterwards. Exits with 1 if a median share is below 70 %, or a rank took more than 64 MiB, or more than 5 %
of what one rank alone reads stayed in the cache. Removes all that it wrote.
"""

from __future__ import annotations

import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rlbatch.checkpoint.hf import HfTensors, HfWriter
from rlbatch.checkpoint.reading import Reading
from rlbatch.config.hf_config import read_config
from rlbatch.config.schema import Config, LayoutConfig, TrainConfig
from rlbatch.megatron import parallel
from rlbatch.megatron.checkpoint import TrainerState, load_state
from rlbatch.megatron.trainer import Trainer
from rlbatch.prompts.embedded import write_embedded_task
from rlbatch.rank_pools import RankPool
from rlbatch.registry import load_plugins
from rlbatch.weights.coverage import expert_names
from tests.checkpoint.test_reading import cached_pages
from tests.large_models import CONFIGS

BLOCK_BYTES = 8 * 2**20
SHARD_BYTES = 10**9
WANTED, CACHED = 0.7, 0.05
MARGIN_BYTES = 2**26
HIDDEN, WIDTH = 2048, 768
EXPERT_BYTES = 3 * WIDTH * HIDDEN * 2
"""In bf16."""

_trainers: list[Trainer] = []


def tensors(experts: int) -> Iterator[tuple[str, Tensor]]:
    """Of a checkpoint with one layer and a small vocabulary."""

    def made(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16).fill_(1) if len(shape) == 1 else torch.randn(shape).mul_(0.02).bfloat16()

    yield from ((name, made(64, HIDDEN)) for name in ("model.embed_tokens.weight", "lm_head.weight"))
    yield "model.norm.weight", made(HIDDEN)
    for name, shape in {
        "self_attn.q_proj": (4096, HIDDEN),
        "self_attn.k_proj": (512, HIDDEN),
        "self_attn.v_proj": (512, HIDDEN),
        "self_attn.o_proj": (HIDDEN, 4096),
        "self_attn.q_norm": (128,),
        "self_attn.k_norm": (128,),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
        "mlp.gate": (experts, HIDDEN),
    }.items():
        yield f"model.layers.0.{name}.weight", made(*shape)
    for expert in range(experts):
        stem = f"model.layers.0.mlp.experts.{expert}"
        yield from ((f"{stem}.{name}_proj.weight", made(WIDTH, HIDDEN)) for name in ("gate", "up"))
        yield f"{stem}.down_proj.weight", made(HIDDEN, WIDTH)


def build(folder: str, ranks: int, state: str) -> int:
    """This rank's trainer, which writes its state; the bytes that it will read of it."""
    layout = LayoutConfig(world_size=ranks, ep_size=ranks)
    parallel.initialize_groups(layout, seed=0)
    registry = load_plugins()
    config = Config(layout=layout, train=TrainConfig(precision="bf16"))
    trainer = Trainer(config, registry.resolve_model_family(read_config(Path(folder))), registry.build_offload("none", {}))
    trainer.load(HfTensors(Path(folder)).read)
    for param in trainer.params.values():
        if isinstance(param, torch.nn.Parameter):
            param.main_grad.zero_()
    trainer.next_learning_rate()
    trainer.optimizer.step()
    written = TrainerState(trainer)
    written.write(Path(state))
    trainer.release_gradients()
    _trainers[:] = [trainer]
    return written.write_bytes


def load(folder: str, is_state: bool) -> tuple[float, float, int]:
    """On this rank: seconds, processor seconds, and memory beyond what there was."""
    (trainer,) = _trainers
    experts = frozenset(expert_names(load_plugins().resolve_model_family(read_config(Path(folder))))) if not is_state else frozenset()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
    before = _status("VmRSS")
    dist.barrier()
    started, busy = time.perf_counter(), time.process_time()
    if is_state:
        load_state(trainer, Path(folder))
    else:
        found = HfTensors(Path(folder), Reading(finite=True), read_once=experts)
        trainer.load(found.source, found.names())
    return time.perf_counter() - started, time.process_time() - busy, _status("VmHWM") - before


def _status(key: str) -> int:
    """Bytes, of /proc/self/status."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{key}:")))


def files_of(folder: Path) -> list[Path]:
    """The large ones."""
    return sorted(path for path in folder.iterdir() if path.stat().st_size >= BLOCK_BYTES)


def shared_bytes(folder: Path) -> int:
    """Of what several ranks read, which they find in the page cache: all but experts."""
    tensors = HfTensors(folder)
    stored = (tensors.stored(name) for name in tensors.names() if ".experts." not in name)
    return sum(math.prod(each.shape) * each.dtype.itemsize for each in stored)


def forget(folder: Path) -> None:
    """Takes a folder's files out of the page cache."""
    for path in files_of(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def dd(folder: Path, readers: int) -> float:
    """Seconds until as many ``dd`` have read all files: each its part of every one."""
    started = time.perf_counter()
    for path in files_of(folder):
        count = -(-path.stat().st_size // BLOCK_BYTES // readers)
        options = [f"if={path}", "of=/dev/null", f"bs={BLOCK_BYTES}", f"count={count}", "iflag=direct", "status=none"]
        copies = [subprocess.Popen(["dd", *options, f"skip={count * number}"]) for number in range(readers)]
        if sum(copy.wait() for copy in copies):
            raise SystemExit("dd failed")
    return time.perf_counter() - started


def main(arguments: list[str]) -> int:
    """Measures and prints; the exit code."""
    from benchmarks import loading as module  # its ranks import it by this name

    options = {"ranks": "2", "gigabytes": "1", "rounds": "2", "folder": tempfile.gettempdir()}
    options |= dict(argument.split("=", 1) for argument in arguments)
    ranks = int(options["ranks"])
    experts = ranks * max(8, round(float(options["gigabytes"]) * 1e9 / EXPERT_BYTES / ranks))
    root = Path(tempfile.mkdtemp(prefix="loading", dir=options["folder"]))
    pool, is_good = RankPool(ranks), True
    try:
        write_embedded_task(root / "task", seed=0)
        config = {**CONFIGS["qwen3_30b"], "num_hidden_layers": 1, "num_experts": experts, "vocab_size": 64}
        writer = HfWriter(root / "model", root / "task" / "model", SHARD_BYTES, config)
        writer.write(tensors(experts))
        writer.close()
        (root / "state").mkdir()
        pool.run(module.build, str(root / "model"), ranks, str(root / "state"), timeout_s=1200.0)
        for name in ("model", "state"):
            folder, shares = root / name, []
            nbytes = sum(path.stat().st_size for path in files_of(folder))
            most_cached = CACHED * nbytes + (shared_bytes(folder) if name == "model" else 0)
            for number in range(int(options["rounds"])):
                forget(folder)
                compared = dd(folder, ranks)
                forget(folder)
                answers = pool.run(module.load, str(folder), name == "state", timeout_s=1200.0)
                seconds, busy, taken = (max(values) for values in zip(*answers, strict=True))
                cached = sum(cached_pages(path) for path in files_of(folder)) * os.sysconf("SC_PAGESIZE")
                shares.append(compared / seconds)
                is_good &= taken <= MARGIN_BYTES and cached <= most_cached
                print(
                    f"{name}, round {number + 1}: {nbytes / 1e9:.2f} GB by {ranks} ranks {nbytes / seconds / 1e9:.2f} GB/s, dd "
                    f"{nbytes / compared / 1e9:.2f} GB/s, share {shares[-1]:.0%}; "
                    f"{busy:.1f} s of a processor and {taken / 2**20:.0f} MiB of memory a rank, "
                    f"{cached / 1e9:.2f} GB in the page cache",
                    flush=True,
                )
            is_good &= statistics.median(shares) >= WANTED
    finally:
        pool.close()
        shutil.rmtree(root, ignore_errors=True)
    return int(not is_good)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
