"""Real jobs at size, checked: ``python -m benchmarks.real_job CASE [name=value ...] [key=value ...]``.

- ``resume``: a job of two steps saves and ends; the third step is then made twice from that checkpoint, under its layout and under another.
  Losses, gradient norms and rewards of both must agree (``tolerance``), and the save may take no more beside what was held than 2 GiB and
  two buffers of host memory a rank, and 1 GiB of a GPU.
- ``steps``: three steps without a save.
- ``offload``: with the most layers that ``rlbatch.plan`` says fit, two steps (and with ``save=1`` a save and the third step, resumed);
  two layers more, or as many as are then refused and not merely too close, must be refused, and fail when that is forced.

The model has the shape of Qwen3-30B-A3B, random weights and ``layers`` layers, a file a layer; prompts are the embedded task's,
the reward is a hash of the response. Names: ``layers=8 ranks=2 gpus=1 folder=/tmp/real_job tolerance=0.02 other="layout.tp_size=2"
save=0 engine=PYTHON-WITH-VLLM``; ``gpus=0`` makes all of it tiny, on CPUs, with transformers as engine. Other arguments are keys of the
job, e.g. ``offload=cpu_adam offload.options.fraction=0.5 offload.options.optimizer_state=true``.

Prints what it measured, a line for each check, and exits with 1 if one fails. Its folder stays.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import save_file
from torch import Tensor

from rlbatch.checkpoint import run_folder
from rlbatch.checkpoint.hf_index import INDEX
from rlbatch.plan.parameters import ModelSize
from rlbatch.prompts.embedded import write_embedded_task
from rlbatch.registry import load_plugins
from tests.large_models import CONFIGS

GIB = 2**30
HOST_GIB, GPU_GIB = 2.0, 1.0
"""What a save may take beside what is held; on the host also two buffers (152 MiB)."""
BUFFERS_GIB = 152 / 1024
LAYER = re.compile(r"model\.layers\.(\d+)\.")
GPU_USED = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
VISIBLE = "CUDA_VISIBLE_DEVICES"
FITS, REFUSED = 0, 2
"""Exit codes."""
DRAWN = 2**22
"""Random numbers."""
COMPARED = ("train/loss", "train/grad_norm", "reward/mean")
NAMES = {
    "layers": 8,
    "ranks": 2,
    "gpus": 1,
    "folder": "/tmp/real_job",
    "tolerance": 0.02,
    "other": "layout.tp_size=2",
    "save": 0,
    "engine": "",
}
REWARD = """import zlib

from rlbatch.api import hookimpl


def hashed(samples):
    return [float(zlib.crc32(sample.response.encode()) % 2) for sample in samples]


@hookimpl
def rlbatch_register_rewards():
    return {"hashed": hashed}
"""
TINY = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 64,
    "max_position_embeddings": 256,
}


@dataclass
class Setup:
    """What the arguments say."""

    case: str
    keys: list[str]
    layers: int
    ranks: int
    gpus: int
    folder: Path
    tolerance: float
    other: list[str]
    save: bool
    engine: str

    @classmethod
    def of(cls, arguments: list[str]) -> Setup:
        """Of the command line."""
        case, *rest = arguments
        given = {name: value for name, _, value in (each.partition("=") for each in rest) if name in NAMES}
        own: dict[str, Any] = {}
        for name, default in NAMES.items():
            kind: Any = type(default)
            own[name] = kind(given.get(name, default))
        keys = [each for each in rest if each.partition("=")[0] not in NAMES]
        folder, other, save = Path(own.pop("folder")), own.pop("other").split(), bool(own.pop("save"))
        return cls(case, keys, folder=folder, other=other, save=save, **own)

    def model(self, layers: int) -> dict[str, Any]:
        """The config.json of so many layers."""
        return {
            **CONFIGS["qwen3_30b"],
            **({} if self.gpus else TINY),
            "num_hidden_layers": layers,
            "architectures": ["Qwen3MoeForCausalLM"],
        }

    def job(self, layers: int, run: str, steps: int) -> list[str]:
        """Keys of a job of so many steps."""
        at_size = [
            "train.prompts_per_step=64",
            "algorithm.group_size=8",
            "rollout.max_response_tokens=256",
            "train.max_tokens_per_gpu=8192",
        ]
        engine = ["rollout=vllm", "rollout.engine.max_model_len=2048", "rollout.engine.enforce_eager=true"]
        engine += [f"rollout.engine.python={self.engine}"] if self.engine else []
        tiny = ["train.prompts_per_step=4", "algorithm.group_size=2", "rollout.max_response_tokens=4", "rollout=transformers"]
        return [
            "experiment=hf",
            f"model.hf={self.folder}/model_{layers}",
            f"data.train={self.folder}/task/train.jsonl",
            f"plugins=[{self.folder}/reward_hash.py]",
            "reward=hashed",
            f"layout.world_size={self.ranks}",
            f"layout.ep_size={self.ranks}",
            "train.precision=bf16",
            *([*at_size, *engine] if self.gpus else tiny),
            "offload=gradients",
            "trackers=[jsonl]",
            f"run_dir={self.folder}/{run}",
            f"train.steps={steps}",
            "checkpoint.save_interval=-1",
            *self.keys,
        ]


@dataclass
class Measured:
    """A job that was watched.

    Attributes:
        code: How it ended.
        seconds: That it took.
        host: GiB of the largest rank: most before a save, and during one.
        gpu: GiB used of the fullest GPU: the same.
        tail: The last lines that it printed.
    """

    code: int = 0
    seconds: float = 0.0
    host: dict[bool, float] = field(default_factory=lambda: {False: 0.0, True: 0.0})
    gpu: dict[bool, float] = field(default_factory=lambda: {False: 0.0, True: 0.0})
    tail: str = ""


def write_model(setup: Setup, layers: int, *, weights: bool) -> Path:
    """The folder of a random model; a layer's weights are written once, and are in the folders of all models that have it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder, task = setup.folder / f"model_{layers}", setup.folder / "task"
    if (folder / INDEX).exists() or (folder.exists() and not weights):
        return folder
    write_embedded_task(task, seed=0)
    (setup.folder / "reward_hash.py").write_text(REWARD)
    own = json.loads((task / "model" / "config.json").read_text())
    config = {**setup.model(layers), **{key: own[key] for key in ("pad_token_id", "bos_token_id", "eos_token_id")}}
    shutil.copytree(task / "model", folder, dirs_exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if weights:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
        _link_weights(folder, setup.folder / "weights", dict(_checkpoint(model)))
    return folder


def _link_weights(folder: Path, written: Path, tensors: dict[str, Tensor]) -> None:
    """A file a layer and one for what is in none."""
    written.mkdir(exist_ok=True)
    files = {name: f"{LAYER.match(name)[1] if LAYER.match(name) else 'rest'}.safetensors" for name in tensors}  # type: ignore[index]
    for file in sorted(set(files.values())):
        if not (written / file).exists():
            save_file({name: _random(name, tensor) for name, tensor in tensors.items() if files[name] == file}, written / "draft")
            (written / "draft").rename(written / file)
        (folder / file).hardlink_to(written / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))


def _checkpoint(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Checkpoint names and tensors; transformers stacks the experts."""
    for name, param in model.named_parameters():
        stem, _, leaf = name.rpartition(".")
        if leaf == "gate_up_proj":
            for expert, both in enumerate(param.detach()):
                gate, up = both.chunk(2, 0)
                yield from ((f"{stem}.{expert}.gate_proj.weight", gate), (f"{stem}.{expert}.up_proj.weight", up))
        elif leaf == "down_proj":
            yield from ((f"{stem}.{expert}.down_proj.weight", tensor) for expert, tensor in enumerate(param.detach()))
        else:
            yield name, param.detach()


@cache
def _drawn() -> Tensor:
    """The list, twice: a part that begins in the first ends in the second."""
    return torch.randn(DRAWN, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16().repeat(2)


def _random(name: str, tensor: Tensor) -> Tensor:
    """A part of one list of random numbers, at a place of its own: to draw as many anew takes minutes, and on a GPU its memory."""
    if tensor.dim() == 1:
        return torch.ones(tensor.shape, dtype=tensor.dtype)
    first, size = zlib.crc32(name.encode()) % DRAWN, tensor.numel()
    drawn = _drawn() if size <= DRAWN else _drawn().repeat(size // DRAWN)
    return drawn[first : first + size].view(tensor.shape).clone()


def run(setup: Setup, keys: list[str], saved_step: int = 0) -> Measured:
    """Runs a job, and watches its memory; a save is going on while the draft of its checkpoint is there."""
    found, ended = Measured(), threading.Event()
    run_dir = Path(next(key for key in keys if key.startswith("run_dir=")).partition("=")[2])
    draft = run_folder.draft_folder(run_folder.checkpoint_root("", run_dir), saved_step) if saved_step else None
    started, output = time.perf_counter(), setup.folder / "output.log"
    with output.open("w+") as log:
        job = subprocess.Popen([sys.executable, "-m", "rlbatch.submit", *keys], stdout=log, stderr=subprocess.STDOUT)
        watch = threading.Thread(target=_watch, args=(job.pid, draft, found, ended))
        watch.start()
        found.code = job.wait()
        ended.set()
        watch.join()
    found.seconds, found.tail = time.perf_counter() - started, "\n".join(output.read_text(errors="replace").splitlines()[-12:])
    print(f"\n{' '.join(keys)}\n-> exit code {found.code} after {found.seconds:.0f} s\n{found.tail}", flush=True)
    return found


def _watch(pid: int, draft: Path | None, found: Measured, ended: threading.Event) -> None:
    """Asks the driver of the GPUs' memory: this process must not have a context on them."""
    has_gpus, command = shutil.which(GPU_USED[0]) is not None, GPU_USED + [f"--id={ids}" for ids in (os.environ.get(VISIBLE),) if ids]
    while not ended.wait(0.2):
        is_saving, ranks = draft is not None and draft.exists(), [0.0]
        with suppress(psutil.Error):  # it has ended
            for process in psutil.Process(pid).children(recursive=True):
                with suppress(psutil.Error):
                    if "rlbatch.run" in process.cmdline():
                        ranks.append(process.memory_info().rss / GIB)
        found.host[is_saving] = max(found.host[is_saving], *ranks) if is_saving else max(ranks)  # before a save: the last one
        if has_gpus:
            used = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
            most = max(map(float, used)) / 1024
            found.gpu[is_saving] = max(found.gpu[is_saving], most) if is_saving else most
        if draft is not None and not is_saving and found.host[True]:
            return  # it is over


def told(what: str, is_so: bool) -> int:
    """Prints a check; returns how many of it failed."""
    print(f"{'ok ' if is_so else 'BAD'}  {what}", flush=True)
    return int(not is_so)


def of_step(setup: Setup, run_name: str, step: int) -> dict[str, float]:
    """What a step measured."""
    lines = (setup.folder / run_name / "metrics.jsonl").read_text().splitlines()
    return {tag: value for told in map(json.loads, lines) if told["step"] == step for tag, value in told.items()}


def resume(setup: Setup) -> int:
    """The case of that name."""
    write_model(setup, setup.layers, weights=True)
    shutil.rmtree(setup.folder / "run", ignore_errors=True)
    saved = run(setup, [*setup.job(setup.layers, "run", 2), "checkpoint.save_interval=2"], saved_step=2)
    failures = told("two steps and a save", saved.code == 0)
    if failures:
        return failures
    host, gpu = (taken[True] - taken[False] for taken in (saved.host, saved.gpu))
    failures += told(f"the save took {host:.2f} GiB more of a rank's host memory", host <= HOST_GIB + BUFFERS_GIB)
    failures += told(f"and {gpu:.2f} GiB more of a GPU", gpu <= GPU_GIB)
    metrics = []
    for name, keys in (("same", []), ("other", setup.other)):
        shutil.rmtree(setup.folder / name, ignore_errors=True)
        shutil.copytree(setup.folder / "run", setup.folder / name, ignore=shutil.ignore_patterns("checkpoints"))
        (setup.folder / name / "checkpoints").symlink_to(setup.folder / "run" / "checkpoints")
        again = run(setup, [*setup.job(setup.layers, name, 3), "resume=auto", *keys])
        failures += told(f"the third step, {name} layout", again.code == 0)
        metrics.append(of_step(setup, name, 3) if again.code == 0 else {})
    for tag in COMPARED:
        one, other = (each.get(tag, math.nan) for each in metrics)
        is_close = math.isclose(one, other, rel_tol=setup.tolerance, abs_tol=setup.tolerance * 1e-3)
        failures += told(f"{tag} of the third step: {one:.6g} and {other:.6g}", is_close)
    return failures


def steps(setup: Setup) -> int:
    """The case of that name."""
    write_model(setup, setup.layers, weights=True)
    shutil.rmtree(setup.folder / "run", ignore_errors=True)
    made = run(setup, setup.job(setup.layers, "run", 3))
    if made.code == 0:
        print(json.dumps(json.loads((setup.folder / "run" / "summary.json").read_text())["plan_vs_actual"]["memory"], indent=1))
    return told(f"three steps of {setup.layers} layers", made.code == 0)


def offload(setup: Setup) -> int:
    """The case of that name."""
    layers = setup.layers
    while _planned(setup, layers + 2) == FITS:
        layers += 2
    while layers > 1 and _planned(setup, layers) != FITS:
        layers -= 1
    family = load_plugins().resolve_model_family(setup.model(layers))
    print(f"{layers} layers fit, {ModelSize(family).total.total / 1e9:.2f} B parameters", flush=True)
    setup.layers = layers
    failures = resume(setup) if setup.save else steps(setup)
    layers += 2
    while _planned(setup, layers) != REFUSED:
        layers += 1
    refused = run(setup, setup.job(layers, "refused", 2))
    failures += told(f"{layers} layers are refused", refused.code == REFUSED)
    write_model(setup, layers, weights=True)
    forced = run(
        setup,
        [*setup.job(layers, "forced", 2), "cluster.gpu_memory_gib=9999", "cluster.host_memory_gib=9999", "launch.preflight=false"],
    )
    return failures + told("and fail when that is forced", forced.code != 0)


def _planned(setup: Setup, layers: int) -> int:
    """What ``rlbatch.plan`` ends with: ``FITS``, ``REFUSED``, or 1 where it is too close."""
    write_model(setup, layers, weights=False)
    plan = subprocess.run(
        [sys.executable, "-m", "rlbatch.plan", *setup.job(layers, "plan", 2)], capture_output=True, text=True, check=False
    )
    return plan.returncode


def main(arguments: list[str]) -> int:
    """Runs a case."""
    cases = {"resume": resume, "steps": steps, "offload": offload}
    if not arguments or arguments[0] not in cases:
        print(__doc__)
        return 2
    setup = Setup.of(arguments)
    setup.folder.mkdir(parents=True, exist_ok=True)
    return int(bool(cases[setup.case](setup)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
