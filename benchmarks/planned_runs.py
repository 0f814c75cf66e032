"""Runs on GPUs beside what is planned of them: ``python -m benchmarks.planned_runs part=1``, then ``part=2``, on two; ``part=3`` on one.

A row is a model of a published shape with random weights and as many layers as the plan says fit, and two microbatches a GPU: its trainer
alone makes three updates, or (``engine``) a job of ``python -m rlbatch.submit`` makes three steps with vLLM beside it. ``more`` rows have
two layers more than fit, and must run out of memory. Prints a table with what was planned and measured, as it grows: the peak of the
trainer's tensors, what a GPU and the node use, and seconds of an update and of a job's step (on stderr: of its phases). A part ends after
``seconds=560`` at the latest: a row that takes longer than what is left, or than 200 s, is ended, and named with those that it did not come
to. Options: ``gpu=H200``, ``row=<part of a name>``, ``python=<interpreter with vLLM>``; ``size=tiny`` tries all of it on CPUs, with nothing
to compare.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.shapes import COMMON, MODELS
from rlbatch.api import ModelFamily
from rlbatch.pipeline.plan_vs_actual import node_used_gib
from rlbatch.plan.accounting import planned_memory
from rlbatch.plan.engine_memory import GIB, MemoryInputs, memory_inputs
from rlbatch.plan.job_plan import JobPlan, plan_job
from rlbatch.plan.memory import PROCESS_GIB, Peak
from rlbatch.plan.parameters import ModelSize
from rlbatch.registry import compose_job, load_plugins

SHAPES = {name: {**COMMON, **MODELS[name]} for name in ("qwen3_30b", "deepseek")}
"""Qwen3-30B-A3B, and DeepSeek-V3 cut in its widths: latent attention, 256 experts of which 8 and a shared one."""
TINY = {
    **{"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4},
    **{"head_dim": 16, "vocab_size": 128, "num_experts": 8, "num_experts_per_tok": 2, "n_routed_experts": 8, "n_group": 2, "topk_group": 1},
    **{"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16},
}
MOST_S, LEAST_S = 200, 60
"""Of a run; and what must be left for one that is begun."""
KILL_AFTER_S = 30
"""From a run's request to end to its end."""
MEAN, MICROBATCHES, STEPS, MOST_LAYERS, ENGINE_LAYERS = 1024, 2, 3, 96, 4
"""Tokens of a prompt and of a response; microbatches of an update and GPU; updates or steps; layers that are tried, and of a job."""
JOBS_PROMPT = 4
"""Tokens of a prompt of a job: the embedded task's."""
DIGITS = (1, 1, 1, 2, 2)


@dataclass(frozen=True)
class Row:
    """A run.

    Attributes:
        part: When it is made.
        shape: Of ``SHAPES``.
        gpus: Experts are over all of them.
        tokens: Of a pack.
        is_remade: Whether everything is recomputed.
        fraction: Of the optimizer that is on the host.
        more: Layers beyond those that fit.
        has_engine: Whether it is a whole job.
    """

    part: int
    shape: str
    gpus: int
    tokens: int
    is_remade: bool = False
    fraction: float = 0.0
    more: int = 0
    has_engine: bool = False

    @property
    def name(self) -> str:
        """In words."""
        parts = [
            self.shape,
            f"{self.gpus} GPU",
            f"{self.tokens // 1024}k",
            "full" if self.is_remade else "none",
            f"offload {self.fraction:g}",
        ]
        return ", ".join(parts + ["engine"] * self.has_engine + [f"{self.more} layers more"] * bool(self.more))


ROWS = (
    Row(1, "qwen3_30b", 2, 8192),
    Row(1, "qwen3_30b", 2, 8192, more=2),
    Row(1, "qwen3_30b", 2, 32768, is_remade=True, fraction=0.5),
    Row(1, "deepseek", 2, 8192, is_remade=True),
    Row(1, "deepseek", 2, 8192, is_remade=True, more=2),
    Row(2, "qwen3_30b", 2, 8192, has_engine=True),
    Row(2, "qwen3_30b", 2, 32768, is_remade=True, has_engine=True),
    Row(2, "deepseek", 2, 32768, is_remade=True, fraction=1.0),
    Row(3, "qwen3_30b", 1, 8192),
    Row(3, "qwen3_30b", 1, 8192, more=2),
    Row(3, "qwen3_30b", 1, 32768, is_remade=True),
    Row(3, "deepseek", 1, 8192),
    Row(3, "deepseek", 1, 8192, more=2),
    Row(3, "qwen3_30b", 1, 8192, fraction=1.0),
    Row(3, "deepseek", 1, 32768, is_remade=True, fraction=0.5),
    Row(3, "qwen3_30b", 1, 8192, has_engine=True),
    Row(3, "deepseek", 1, 8192, has_engine=True),
)
"""The most telling first: a part may end early."""


@dataclass(frozen=True)
class Machine:
    """Where they are made; GiB, 0 on CPUs."""

    gpu: str
    gpu_gib: float
    host_gib: float
    is_tiny: bool
    python: str


def main(arguments: list[str]) -> None:
    """Makes the runs of a part, or (``child=``) is a rank of one."""
    said = dict(argument.split("=", 1) for argument in arguments)
    if "child" in said:
        _updates(json.loads(said["child"]))
        return
    end, is_tiny = time.monotonic() + float(said.get("seconds", 560)) - KILL_AFTER_S, said.get("size") == "tiny"
    machine = Machine(said.get("gpu", "H200"), 0.0 if is_tiny else _gpu_gib(), _host_gib(), is_tiny, said.get("python", ""))
    rows = [row for row in ROWS if row.part == int(said.get("part", 1)) and said.get("row", "") in row.name]
    heads = "".join(f"{head:>18}" for head in ("trainer GiB", "GPU GiB", "node GiB", "update s", "step s"))
    print(f"{'run':<58}{'layers':>7}{heads}   planned, measured", flush=True)
    print(f"{'(before any)':<58}{'':>52}{node_used_gib():>9.1f}", flush=True)
    for row in rows:
        if (left := end - time.monotonic()) < LEAST_S:
            print(f"{row.name:<58} not run: no time was left", flush=True)
            continue
        print(*_run(row, machine, min(left, MOST_S)), sep="\n", flush=True)


def _run(row: Row, machine: Machine, limit_s: float) -> Iterator[str]:
    keys = _keys(row, machine)
    config, registry = compose_job([*keys, "model.hf=x"])
    inputs = memory_inputs(config, registry, None, on_gpu=not machine.is_tiny)
    layers = ENGINE_LAYERS if row.has_engine else 2 if machine.is_tiny else most_layers(inputs, row, machine)
    plan = _planned(inputs, row, layers + row.more, machine)
    found = (_job if row.has_engine else _trainer)(row, layers + row.more, keys, machine, limit_s)
    if "failed" in found:
        yield f"{row.name:<58}{layers + row.more:>7}  {found['failed']}"
        return
    cells = "".join(
        f"{planned:>9.{digits}f}{found.get(name, math.nan):>9.{digits}f}"
        for (name, planned), digits in zip(planned_numbers(row, plan, on_gpu=not machine.is_tiny).items(), DIGITS, strict=True)
    )
    yield f"{row.name:<58}{layers + row.more:>7}{cells}"


def planned_numbers(row: Row, plan: JobPlan, *, on_gpu: bool) -> dict[str, float]:
    """What is planned of what a run measures: GiB of the trainer's tensors, of a GPU and a node, seconds of an update and a step."""
    table = planned_memory(plan.memory, (row.gpus,), on_gpu=on_gpu)["update"]
    engine = 0.0 if row.has_engine else sum(size for part, size in _update(plan).parts.items() if part.startswith("engine's")) / GIB
    return {
        "trainer": table.get("trainer", {}).get("planned", math.nan),
        "gpu": table.get("gpu", {}).get("planned", math.nan) - engine,
        "node": table["node"]["planned"] - _engines_processes(row, plan),
        "update": plan.time.phases["update"] if plan.time else math.nan,
        "step": plan.time.seconds if plan.time and row.has_engine else math.nan,
    }


def most_layers(inputs: MemoryInputs, row: Row, machine: Machine) -> int:
    """As many as the plan says fit, its error included; of a trainer without what an engine would take."""
    found = 0
    for layers in range(1, MOST_LAYERS):
        plan = _planned(inputs, row, layers, machine)
        peak, floor = _update(plan), Peak("update", plan.memory.floor.stages[0].gpu["update"])
        own = Peak("update", {name: size for name, size in peak.parts.items() if not name.startswith("engine's")})
        host, spread = plan.memory.host((row.gpus,), "update")
        host_gib = host.gib + spread - _engines_processes(row, plan)
        if own.gib + plan.memory.spread(own, floor) > machine.gpu_gib or host_gib > machine.host_gib:
            break
        found = layers
    return found


def _engines_processes(row: Row, plan: JobPlan) -> float:
    """GiB of a node that are planned for processes of engines, where a row has none."""
    return row.gpus * PROCESS_GIB["gpu"] if plan.job.has_process and not row.has_engine else 0.0


def plan_of_row(row: Row, layers: int, machine: Machine) -> JobPlan:
    """What is planned of it with so many layers."""
    config, registry = compose_job([*_keys(row, machine), "model.hf=x"])
    return _planned(memory_inputs(config, registry, None, on_gpu=not machine.is_tiny), row, layers, machine)


def _planned(inputs: MemoryInputs, row: Row, layers: int, machine: Machine) -> JobPlan:
    return plan_job(replace(inputs, model=ModelSize(_family(row.shape, layers, is_tiny=machine.is_tiny))), (row.gpus,))


def _update(plan: JobPlan) -> Peak:
    return plan.memory.gpu_of_stage(0, "update")[0]


def _family(shape: str, layers: int, *, is_tiny: bool) -> ModelFamily:
    return load_plugins().resolve_model_family(_fields(shape, layers, is_tiny=is_tiny))


def _fields(shape: str, layers: int, *, is_tiny: bool) -> dict[str, Any]:
    fields = {**SHAPES[shape], "num_hidden_layers": layers}
    return {name: TINY[name] if is_tiny and name in TINY else value for name, value in fields.items()}


def _keys(row: Row, machine: Machine) -> list[str]:
    mean, tokens = (16, 256) if machine.is_tiny else (MEAN, row.tokens)
    keys = {
        "experiment": "hf",
        "reward": "number",
        "data.train": "x",
        "train.steps": STEPS,
        "checkpoint.save_interval": -1,
        "layout.world_size": row.gpus,
        "layout.ep_size": row.gpus,
        "train.max_tokens_per_gpu": tokens,
        "train.prompts_per_step": max(row.gpus * MICROBATCHES * tokens // (2 * mean) // 8, 1),
        "algorithm.group_size": 8,
        "data.max_prompt_tokens": mean,
        "rollout.max_response_tokens": mean,
        "plan.assume.mean_prompt_tokens": JOBS_PROMPT if row.has_engine else mean,
        "plan.assume.mean_response_tokens": mean,
        "plan.assume.pack_fullness": 1,
        "plan.calibrations": "",
        "rollout": "transformers" if machine.is_tiny else "vllm",
    }
    if row.is_remade:
        keys |= {"layout.recompute_granularity": "full", "layout.recompute_method": "uniform", "layout.recompute_num_layers": 1}
    if machine.is_tiny:
        return [f"{name}={value}" for name, value in keys.items()] + ["train.spec=local", "cluster.gres="]
    if row.fraction:
        keys |= {"offload": "cpu_adam", "offload.options.fraction": row.fraction}
    keys |= {
        "train.precision": "bf16",
        "rollout.quantization": "none",
        "rollout.options.gpus_per_engine": row.gpus,
        "rollout.engine.gpu_memory_utilization": 0.4,
        "cluster.gpu": machine.gpu,
        "cluster.gpu_memory_gib": round(machine.gpu_gib, 1),
        "cluster.host_memory_gib": round(machine.host_gib),
        "cluster.gpus_per_node": row.gpus,
    }
    python = [f"rollout.engine.python={machine.python}"] if machine.python else []
    return [f"{name}={value}" for name, value in keys.items()] + python


def _trainer(row: Row, layers: int, keys: list[str], machine: Machine, limit_s: float) -> dict[str, Any]:
    """What the first of its ranks says last."""
    child = json.dumps({"fields": _fields(row.shape, layers, is_tiny=machine.is_tiny), "keys": keys})
    launch = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={row.gpus}", "-m", "benchmarks.planned_runs")
    done = _done(limit_s, *launch, f"child={child}")
    said = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(said[-1]) if said else _failed(done, limit_s)


def _job(row: Row, layers: int, keys: list[str], machine: Machine, limit_s: float) -> dict[str, Any]:
    """What its summary says of it beside its plan."""
    from rlbatch.prompts.embedded import write_embedded_task, write_random_weights

    with tempfile.TemporaryDirectory() as scratch:
        task, run_dir = Path(scratch) / "task", Path(scratch) / "run"
        write_embedded_task(task, seed=0)
        config = task / "model/config.json"
        ids = {name: value for name, value in json.loads(config.read_text()).items() if name.endswith("_token_id")}
        config.write_text(json.dumps({**_fields(row.shape, layers, is_tiny=machine.is_tiny), **ids}))
        write_random_weights(task / "model", seed=0)
        own = [
            f"model.hf={task}/model",
            f"data.train={task}/train.jsonl",
            "reward=length",
            "rollout.max_logprob_diff=null",
            f"run_dir={run_dir}",
        ]
        done = _done(limit_s, "-m", "rlbatch.submit", *keys, *own)
        if done.returncode:
            return _failed(done, limit_s)
        found = json.loads((run_dir / "summary.json").read_text())["plan_vs_actual"]
        print(json.dumps({row.name: found["seconds"]}), file=sys.stderr, flush=True)
        memory = {what: each["measured"] for what, each in found["memory"]["update"].items() if "measured" in each}
        return memory | {phase: found["seconds"][phase]["measured"] for phase in ("update", "step")}


def _done(limit_s: float, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A program of this interpreter that has ended, in time or not."""
    command = ["timeout", f"--kill-after={KILL_AFTER_S}", f"{limit_s:.0f}", sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _failed(done: subprocess.CompletedProcess[str], limit_s: float) -> dict[str, str]:
    if done.returncode in (124, 137):  # as timeout says that it ended it
        return {"failed": f"ended after {limit_s:.0f} s, not done"}
    return {"failed": " ".join((done.stderr + done.stdout).split())[-300:] or f"exit code {done.returncode}"}


def _updates(spec: dict[str, Any]) -> None:
    """A rank: makes updates, and prints on the first one what they took."""
    import torch
    import torch.distributed as dist

    from rlbatch.algorithms.objective import Objective
    from rlbatch.megatron import parallel
    from rlbatch.megatron.trainer import Trainer
    from rlbatch.metrics.phases import OutOfMemory, PhaseClock
    from rlbatch.pipeline.packing import build_microbatches, with_advantages
    from rlbatch.pipeline.plan_vs_actual import node_used_gib
    from tests.gpu.torchrun import process_group

    config, registry = compose_job([*spec["keys"], "model.hf=x"])
    with process_group():
        parallel.initialize_groups(config.layout, seed=0)
        family = registry.resolve_model_family(spec["fields"])
        length = config.data.max_prompt_tokens or 0
        length += config.rollout.max_response_tokens
        count = config.train.prompts_per_step * config.algorithm.group_size // config.layout.world_size
        clock, seconds = PhaseClock(node_used_gib), []
        try:
            trainer = Trainer(config, family, registry.build_offload(config.offload.name, config.offload.options))
            with torch.no_grad():
                for tensor in trainer.params.values():
                    tensor.normal_(0, 0.02) if tensor.ndim > 1 else tensor.fill_(1)
            trainer.weights_changed()
            tokens = [torch.randint(0, family.vocab_size, (length,)) for _ in range(count)]
            ones, zeros = [torch.ones(length) for _ in range(count)], [torch.zeros(length) for _ in range(count)]
            packs = with_advantages(build_microbatches(tokens, ones, zeros, max_tokens=config.train.max_tokens_per_gpu), ones)
            batches = [pack.microbatch for pack in packs]
            for batch in batches:
                batch.old_logprobs = batch.rollout_logprobs
            objective = Objective(config.algorithm, registry.build_loss(config.algorithm))
            for _ in range(STEPS):
                dist.barrier()
                started = time.perf_counter()
                with clock.phase("update"):
                    trainer.update(batches, objective, float(count * length * config.layout.world_size))
                seconds.append(time.perf_counter() - started)
        except (OutOfMemory, torch.OutOfMemoryError) as error:
            print(json.dumps({"failed": f"out of memory: {str(error)[:120]}"}), flush=True)
            os._exit(3)  # the others wait for this rank
        tags = clock.memory.tags()
        named = {"trainer": "memory/gpu_update_gib", "gpu": "memory/gpu_used_update_gib", "node": "memory/node_used_update_gib"}
        if dist.get_rank() == 0:
            print(json.dumps({name: tags[tag] for name, tag in named.items() if tag in tags} | {"update": min(seconds[1:])}), flush=True)


def _gpu_gib() -> float:
    """Of the first GPU, asked without using it."""
    asked = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    return float(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[0]) / 1024


def _host_gib() -> float:
    from rlbatch.launch.preflight.node_facts import host_memory

    return host_memory()[0] / GIB


if __name__ == "__main__":
    main(sys.argv[1:])
