"""Weight sync against a copy: ``python -m benchmarks.weight_sync [device=cuda:0] [gib=4] [kind=qwen3] [rounds=5] [option=value ...]``.

A random model on ``device`` is sent to vLLM, in turn with copies of as many bytes from memory to memory of that device (with
``separate_gpus=1``: to the next GPU; on the CPU: in host memory, and ``gib=0.05`` is enough). Prints medians: GB/s of the copy, and of
syncs seconds, GB/s, the share of the copy's, and the memory that they took of a GPU beside weights and engine, next to its bound of twice
the larger of a bucket and the largest tensor. Kinds of sync: the first one, which vLLM's loaders do and which is audited; later ones of a
trainer's own tensors, which are read where they lie; and of tensors that are copied into buckets, as gathered ones are. Then where the time
of the last ones went. Options: ``bucket_mib=512``, ``python=<interpreter with vLLM>``, ``transport``,
``first=in_place|in_buckets``, ``start_when=<file>`` (measures once it is there), and any of vLLM's.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import RandomModel, random_model
from rlbatch.api import RolloutContext
from rlbatch.engines.backend.hosted import HostedRollout
from rlbatch.weights.export import buckets
from rlbatch_plugins.rollout_vllm import VllmOptions, vllm_rollout

MIB, GB = 2**20, 1e9
PAGE = 2 * MIB
"""Of a GPU's memory: what is given is a multiple."""
POLL_S = 0.001
ENGINE = {"max_model_len": 512, "max_num_seqs": 32, "enforce_eager": True, "kv_cache_memory_bytes": 2**30}
"""A small cache: that vLLM forgets it, block by block, is part of a sync."""


def main(arguments: list[str]) -> None:
    """Runs the benchmark."""
    said = dict(argument.split("=", 1) for argument in arguments)
    device, gib = said.pop("device", "cuda:0"), float(said.pop("gib", 4))
    when, first = said.pop("start_when", ""), said.pop("first", "in_place")
    kind, rounds, bucket_mib = said.pop("kind", "qwen3"), int(said.pop("rounds", 5)), int(said.pop("bucket_mib", 512))
    options = VllmOptions(sleep_level=0, separate_gpus=int(said.pop("separate_gpus", 0)), transport=said.pop("transport", "auto"))
    engine = ENGINE | {name: value if name == "python" else json.loads(value) for name, value in said.items()}
    if device != "cpu":
        engine = {"gpu_memory_utilization": 0.5, **engine}
    with tempfile.TemporaryDirectory() as scratch:
        model = random_model(Path(scratch) / "model", kind, gib, device)
        context = RolloutContext(model.folder, device, model.dtype, engine=engine, folder=Path(scratch) / "engine")
        started = time.perf_counter()
        rollout = vllm_rollout(context, options)
        print(f"{kind}, {model.nbytes / GB:.2f} GB in {len(list(model.named()))} tensors on {_machine(device)}", flush=True)
        print(f"engine started in {time.perf_counter() - started:.0f} s", flush=True)
        try:
            while when and not Path(when).exists():
                time.sleep(0.1)
            _measure(rollout, model, device, bucket_mib, rounds, far=bool(options.separate_gpus), first_in_place=first == "in_place")
        except BaseException:
            print((context.folder / "engine.log").read_text()[-6000:])
            raise
        finally:
            rollout.close()


def _measure(
    rollout: HostedRollout, model: RandomModel, device: str, bucket_mib: int, rounds: int, *, far: bool, first_in_place: bool
) -> None:
    copy = _copier(model.nbytes, device, far=far)
    bound = 2 * -(-max(bucket_mib * MIB, model.largest()) // PAGE) * PAGE
    phases: dict[str, float] = {}
    seconds: dict[str, list[float]] = {"copy": [], "first": [], "in place": [], "in buckets": []}
    memory: dict[str, int] = {}
    where: dict[str, str] = {}
    version = 0

    def sync(kind: str) -> float:
        nonlocal version
        version += 1
        model.change()
        _wait(device)
        lasting = model.storages if kind == "in place" or (kind == "first" and first_in_place) else frozenset()
        with _timed(rollout, phases):
            started = time.perf_counter()
            rollout.update_weights(buckets(model.named(), bucket_mib, version, lasting=lasting))
            taken = time.perf_counter() - started
        where[kind] = ", ".join(f"{name} {value * 1e3:.1f} ms" for name, value in phases.items())
        return taken

    def watched(kind: str) -> float:
        with _peak(device, rollout) as peak:
            taken = sync(kind)
        memory[kind] = peak()
        return taken

    seconds["first"].append(watched("first"))
    again = {kind: watched(kind) for kind in ("in place", "in buckets")}
    print("second syncs, which look up where things are: " + ", ".join(f"{kind} {taken * 1e3:.1f} ms" for kind, taken in again.items()))
    for kind in ("in place", "in buckets"):
        sync(kind)  # a run's syncs are all of one kind: memory stays open
        for _ in range(rounds):
            seconds["copy"].append(copy())
            seconds[kind].append(sync(kind))
    limit = model.nbytes / statistics.median(seconds.pop("copy")) / GB
    print(f"{'copy to the next GPU' if far else 'copy':<22} {limit:8.1f} GB/s")
    for kind, values in seconds.items():
        middle = statistics.median(values)
        rate = model.nbytes / middle / GB
        print(
            f"sync, {kind:<16} {rate:8.1f} GB/s  {rate / limit:6.1%} of the copy  {middle * 1e3:8.1f} ms  "
            f"peak extra memory {memory[kind] / MIB:.0f} MiB (bound {bound / MIB:.0f})"
        )
    for kind, spent in where.items():
        print(f"of the last sync {kind}: {spent}")


def _copier(size: int, device: str, *, far: bool) -> Callable[[], float]:
    """Seconds that a copy of ``size`` bytes takes, in pieces of a GiB."""
    piece = min(size, 2**30)
    source = torch.ones(piece, dtype=torch.uint8, device=device)
    target = torch.empty_like(source, device=f"cuda:{torch.device(device).index + 1}" if far else device)

    def copy() -> float:
        _wait(device)
        started = time.perf_counter()
        for start in range(0, size, piece):
            part = min(piece, size - start)
            target[:part].copy_(source[:part])
        _wait(device)
        return time.perf_counter() - started

    return copy


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


@contextmanager
def _timed(rollout: HostedRollout, phases: dict[str, float]) -> Iterator[None]:
    """Seconds of the steps of a sync: the calls before and after the buckets, and the buckets themselves."""
    ask, send = rollout._ask, rollout._sender.send
    phases.clear()

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                key = arguments[0] if name == "ask" else name
                phases[key] = phases.get(key, 0.0) + time.perf_counter() - started

        return run

    rollout._ask, rollout._sender.send = timed("ask", ask), timed("buckets", send)  # type: ignore[method-assign]
    try:
        yield
    finally:
        rollout._ask, rollout._sender.send = ask, send  # type: ignore[method-assign]


@contextmanager
def _peak(device: str, rollout: HostedRollout) -> Iterator[Callable[[], int]]:
    """How much more memory was used, at most, than before: of one of the GPUs, or of this process and the engine's together."""
    done, before, most = threading.Event(), _used(device, rollout), [0]

    def poll() -> None:
        while not done.wait(POLL_S if device != "cpu" else 0.05):
            most[0] = max(most[0], *(now - then for now, then in zip(_used(device, rollout), before, strict=True)))

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield lambda: most[0]
    finally:
        done.set()
        thread.join()


def _used(device: str, rollout: HostedRollout) -> list[int]:
    """Bytes of each GPU, or of the host."""
    if device != "cpu":
        return [total - free for free, total in (torch.cuda.mem_get_info(index) for index in range(torch.cuda.device_count()))]
    used = 0
    for pid in ("self", *_family(str(rollout._host.pid if rollout._host else 0))):
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        used += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return [used]


def _family(pid: str) -> list[str]:
    """A process and all its descendants."""
    found = [pid]
    for each in found:
        try:
            found += [child for task in Path(f"/proc/{each}/task").iterdir() for child in (task / "children").read_text().split()]
        except OSError:
            continue
    return found


def _machine(device: str) -> str:
    return f"{torch.get_num_threads()} threads of a CPU" if device == "cpu" else torch.cuda.get_device_name(device)


if __name__ == "__main__":
    main(sys.argv[1:])
