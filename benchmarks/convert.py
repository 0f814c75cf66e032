"""Conversion against ``cp``: ``python -m benchmarks.convert [gigabytes=8] [rounds=2] [threads=0] [folder=/tmp] [modes=hf_to_dist,...]``.

Writes a random Qwen3-MoE checkpoint in bf16, then in turn copies it and converts it (to torch_dist for a layout of 8 ranks, back, and to
fp8 and back), each time with the source out of the page cache and the result on the disk. ``cp`` reads as much as it writes, a conversion
perhaps not: GB/s are of what is read and written together, for both. Prints them, the share of ``cp``'s, seconds, CPU time and the peak
resident memory of the converting process, which may use ``threads`` threads (0: as many as cores). Exits with 1 if a mode's median share is
below a half, or one takes more memory than it may. Removes all that it wrote.
"""

from __future__ import annotations

import json
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

from rlbatch.checkpoint.archive import raw_bytes
from rlbatch.convert.hf_output import HfTensor, outputs
from rlbatch.convert.output import Draft

CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LAYOUT = ("layout.pp_size=2", "layout.ep_size=4")
POOL_BYTES = 2**26
MARGIN_GIB = 1.5
WANTED = 0.5
"""Of ``cp``'s rate."""


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the checkpoint."""
    hidden, ffn, heads, width = CONFIG["hidden_size"], CONFIG["moe_intermediate_size"], CONFIG["num_attention_heads"], CONFIG["head_dim"]
    named: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (CONFIG["vocab_size"], hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        named |= {f"{prefix}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        named |= {f"{prefix}self_attn.{name}_norm.weight": (width,) for name in ("q", "k")}
        named |= {f"{prefix}self_attn.{name}_proj.weight": (CONFIG["num_key_value_heads"] * width, hidden) for name in ("k", "v")}
        named |= {f"{prefix}self_attn.q_proj.weight": (heads * width, hidden), f"{prefix}self_attn.o_proj.weight": (hidden, heads * width)}
        named[f"{prefix}mlp.gate.weight"] = (CONFIG["num_experts"], hidden)
        for expert in range(CONFIG["num_experts"]):
            named |= {f"{prefix}mlp.experts.{expert}.{name}_proj.weight": (ffn, hidden) for name in ("gate", "up")}
            named[f"{prefix}mlp.experts.{expert}.down_proj.weight"] = (hidden, ffn)
    return named | {"model.norm.weight": (hidden,), "lm_head.weight": (CONFIG["vocab_size"], hidden)}


def make(folder: Path, gigabytes: float) -> int:
    """Writes the checkpoint; the bytes of its largest tensor."""
    pool = raw_bytes(torch.randn(POOL_BYTES // 2, generator=torch.Generator().manual_seed(0)).mul(0.02).bfloat16())
    layers = 2
    while 2 * sum(torch.Size(shape).numel() for shape in shapes(layers).values()) < gigabytes * 1e9:
        layers += 2

    def parts(nbytes: int, seed: int) -> Iterator[memoryview]:
        start = seed * 4096 % POOL_BYTES
        while nbytes:
            part = pool[start : start + nbytes]
            yield part
            nbytes, start = nbytes - len(part), 0

    tensors = []
    for number, (name, shape) in enumerate(shapes(layers).items()):
        nbytes = 2 * torch.Size(shape).numel()
        tensors.append(HfTensor(name, torch.bfloat16, shape, lambda nbytes=nbytes, number=number: parts(nbytes, number)))
    files, index = outputs(tensors, 4e9)
    draft = Draft(folder, {})
    with draft.opened():
        for file in files:
            draft.write(file, lambda nbytes: None)
        draft.publish({}, index | {"config.json": json.dumps(CONFIG | {"num_hidden_layers": layers}).encode()})
    (folder / "conversion.json").unlink()
    return max(tensor.nbytes for tensor in tensors)


def size(folder: Path) -> int:
    """Bytes of a folder's files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def evict(folder: Path) -> None:
    """Takes a folder's files out of the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(command: list[str], threads: int = 0) -> tuple[float, float, int]:
    """Seconds, CPU seconds and peak resident bytes of a process."""
    environment = os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)}: failed with {os.waitstatus_to_exitcode(status)}")
    return time.perf_counter() - started, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def copy(source: Path, target: Path) -> tuple[float, float]:
    """``cp`` and the data on the disk; seconds and CPU seconds."""
    evict(source)
    seconds, cpu, _ = timed(["sh", "-c", f"cp -r '{source}' '{target}' && sync '{target}'/*"])
    return seconds, cpu


def main(arguments: list[str]) -> int:
    """Measures and prints; the exit code."""
    options = {
        "gigabytes": "8",
        "rounds": "2",
        "threads": "0",
        "modes": "hf_to_dist,dist_to_hf,bf16_to_fp8,fp8_to_bf16",
        "folder": tempfile.gettempdir(),
    } | dict(argument.split("=", 1) for argument in arguments)
    root = Path(tempfile.mkdtemp(prefix="convert", dir=options["folder"]))
    try:
        return measure(root, float(options["gigabytes"]), int(options["rounds"]), options["modes"].split(","), int(options["threads"]))
    finally:
        shutil.rmtree(root)


def measure(root: Path, gigabytes: float, rounds: int, chosen: list[str], threads: int) -> int:
    """All modes in turn with ``cp`` of each one's source; 1 if one is too slow or takes too much memory."""
    bf16, fp8, dist, out = root / "bf16", root / "fp8", root / "dist", root / "out"
    largest = make(bf16, gigabytes)
    limit = 2 * largest + MARGIN_GIB * 2**30
    print(f"checkpoint {size(bf16) / 1e9:.2f} GB, largest tensor {largest / 2**30:.2f} GiB, so at most {limit / 2**30:.2f} GiB resident")
    modes = {
        "hf_to_dist": (bf16, dist, ["mode=hf_to_dist", f"hf={bf16}", *LAYOUT]),
        "dist_to_hf": (dist, out, ["mode=dist_to_hf", f"dist={dist}", f"hf={bf16}"]),
        "bf16_to_fp8": (bf16, fp8, ["mode=bf16_to_fp8", f"hf={bf16}"]),
        "fp8_to_bf16": (fp8, out, ["mode=fp8_to_bf16", f"hf={fp8}"]),
    }
    shares: dict[str, list[float]] = {mode: [] for mode in chosen}
    is_small = True
    for number in range(rounds):
        for mode, (source, target, arguments) in ((mode, modes[mode]) for mode in chosen):
            copied, copy_cpu = copy(source, root / "copy")
            shutil.rmtree(root / "copy")
            shutil.rmtree(target, ignore_errors=True)
            evict(source)
            seconds, cpu, resident = timed([sys.executable, "-m", "rlbatch.convert", *arguments, f"out={target}"], threads)
            moved, rate = size(source) + size(target), 2 * size(source) / copied
            share = moved / seconds / rate
            cp = f"cp {rate / 1e9:.2f} GB/s ({copied:.1f} s, {copy_cpu:.1f} CPU s)"
            convert = f"convert {moved / seconds / 1e9:.2f} GB/s ({seconds:.1f} s, {cpu:.1f} CPU s): {share:.0%}"
            memory = f"peak {resident / 2**30:.2f} GiB{'' if resident <= limit else ' TOO MUCH'}"
            print(f"round {number + 1} {mode:<11} {cp}, {convert}, {memory}", flush=True)
            shares[mode].append(share)
            is_small = is_small and resident <= limit
            if target == out:
                shutil.rmtree(out)
    return 0 if is_small and min(map(statistics.median, shares.values())) >= WANTED else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
