"""Transformer Engine's layers and the local ones in bf16, against fp32: run on a GPU machine with `python -m tests.gpu.te_compare`.

Prints one line a model and layout: the relative L2 error of all log-probs and of all gradients, to the local spec in fp32 on one GPU, of
the local and of the Transformer Engine spec, whose ratio must not exceed ``BOUND``; and that fp32 reference's error to transformers.
Arguments: names of models and of layouts (all), fields of Megatron's config to try with Transformer Engine (`moe_permute_fusion=True`), and
`--cpu` for the local half of it on a host.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from tests.gpu.layouts import LAYOUTS
from tests.gpu.models import MODELS, saved

BOUND = 1.3
"""Most that Transformer Engine may be further from fp32 than the local spec is, both in bf16."""
FP32_BOUND = 1e-4
SIZES = (1, 2)
TE_LAYOUTS = ("1 GPU", "DP2", "EP2", "PP2", "TP2 EP2", "CP2")
Tensors = dict[str, torch.Tensor]


def main() -> int:
    """Compares every layout that this machine has GPUs for."""
    on_gpu = "--cpu" not in sys.argv
    names = [name for name in sys.argv[1:] if name in MODELS] or list(MODELS)
    wanted = [name for name in sys.argv[1:] if name in TE_LAYOUTS] or TE_LAYOUTS
    gpus = torch.cuda.device_count() if on_gpu else 2
    failures = 0
    for name in names:
        with tempfile.TemporaryDirectory() as scratch:
            folder = saved(name, Path(scratch) / name)
            reference: Tensors = {}
            for size in (size for size in SIZES if size <= gpus):
                layouts = [layout for layout in wanted if LAYOUTS[layout].world_size == size]
                specs = ("local", "transformer_engine") if on_gpu else ("local",)
                cases = [f"{spec} bf16 {layout}" for layout in layouts for spec in specs]
                first = ["hf", "local fp32 1 GPU"] if size == 1 else []
                results = _run(folder, size, [*first, *cases, *(["checkpoint"] if on_gpu else [])], on_gpu)
                if size == 1:
                    reference = results["local fp32 1 GPU"]
                    failures += not _report_fp32(name, reference, results["hf"])
                failures += sum(not _report(name, layout, specs, results, reference) for layout in layouts)
                failures += on_gpu and not _report_checkpoints(name, size, results["checkpoint"])
    print("failures:", failures)
    return 1 if failures else 0


def _run(folder: Path, size: int, cases: list[str], on_gpu: bool) -> dict[str, Tensors]:
    results = folder.parent / f"results_{size}"
    results.mkdir()
    environment = os.environ | ({} if on_gpu else {"CUDA_VISIBLE_DEVICES": ""})
    torchrun = ["torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={size}"]
    command = [sys.executable, "-m", *torchrun, "-m", "tests.gpu.te_rank"]
    fields = ",".join(argument for argument in sys.argv[1:] if "=" in argument)
    subprocess.run([*command, str(folder), str(results), fields, *cases], env=environment, check=True)
    return {case: torch.load(results / f"{case}.pt", weights_only=True) for case in cases}


def _gradients(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name not in ("loss", "logprobs")}


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


def _joint(got: Tensors, want: Tensors) -> float:
    """Of all gradients together."""
    return _error(torch.cat([got[n].flatten() for n in want]), torch.cat([want[n].flatten() for n in want]))


def _report_fp32(name: str, reference: Tensors, hugging_face: Tensors) -> bool:
    error = _error(reference["logprobs"], hugging_face["logprobs"])
    print(f"{name:<12} fp32       log-probs to transformers' {error:.2e}  {'ok' if error <= FP32_BOUND else 'TOO LARGE'}")
    return error <= FP32_BOUND


def _report(name: str, layout: str, specs: tuple[str, ...], results: dict[str, Tensors], reference: Tensors) -> bool:
    wanted = _gradients(reference)
    errors = []
    for spec in specs:
        got = results[f"{spec} bf16 {layout}"]
        worst, where = max((_error(got[n], wanted[n]), n) for n in wanted)
        errors.append((_error(got["logprobs"], reference["logprobs"]), _joint(got, wanted)))
        print(
            f"{name:<12} {layout:<8} {spec:<18} log-probs {errors[-1][0]:.2e}  gradients {errors[-1][1]:.2e}  worst {worst:.2e} ({where})"
        )
    ratios = [te / local for local, te in zip(*errors, strict=True)] if len(errors) == 2 else []
    verdict = "ok" if all(ratio <= BOUND for ratio in ratios) else "TOO LARGE"
    print(f"{name:<12} {layout:<8} ratio              {'  '.join(f'{ratio:.2f}' for ratio in ratios)}  {verdict}", flush=True)
    return verdict == "ok"


def _report_checkpoints(name: str, size: int, found: Tensors) -> bool:
    saved_names = [key for key in found if " saved " in key]
    same = sum(torch.equal(found[key], found[key.replace(" saved ", " loaded ")]) for key in saved_names)
    print(f"{name:<12} checkpoints of one spec under the other, {size} GPU: {same}/{len(saved_names)} tensors equal", flush=True)
    return same == len(saved_names)


if __name__ == "__main__":
    sys.exit(main())
