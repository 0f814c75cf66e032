"""GRPO steps of a small model on one GPU beside TRL's GRPOTrainer: ``python -m benchmarks.trl model=FOLDER [steps=4] [rounds=2] [...]``.

Both get the same prompts, sample the same number of tokens (each response is full), give a reward that is a hash of the text, and train
once on it with the same objective, learning rate and precision (bf16 products, fp32 weights), with vLLM beside the trainer on the GPU: the
same share of its memory, the same limits, weights dropped while the trainer trains. They run in turn, each in a process of its own,
``rounds`` times; of a run the first step, which compiles, does not count. Prints both tables, medians in seconds by phase. Options:
``prompts=64 samples=8 prompt_tokens=64 response_tokens=256 share=0.3 batch=64`` (TRL's sequences a pass), ``tokens=32768`` (rlbatch's a
pass), ``folder=/tmp/trl``, ``correction=0`` (TRL without its importance sampling, which takes a forward pass), ``only=rlbatch``; other
arguments are keys of rlbatch's job. TRL is imported by this Python (``pip install trl==1.16.0 datasets``), and vLLM too.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.real_job import REWARD

SEED, LEARNING_RATE, CLIP = 1, 1e-6, 0.2
MODULES = ("trl.extras.profiling", "trl.trainer.grpo_trainer")
"""Where TRL takes its timer from."""


@dataclass
class Case:
    """What the arguments say; ``keys`` are of rlbatch's job."""

    model: str = ""
    folder: str = "/tmp/trl"
    steps: int = 4
    rounds: int = 2
    prompts: int = 64
    samples: int = 8
    prompt_tokens: int = 64
    response_tokens: int = 256
    share: float = 0.3
    batch: int = 64
    tokens: int = 32768
    correction: int = 1
    only: str = ""

    @classmethod
    def of(cls, arguments: list[str]) -> tuple[Case, list[str]]:
        """The case, and the arguments that are not of it."""
        kinds = {field.name: type(field.default) for field in fields(cls)}
        said = [argument.partition("=") for argument in arguments]
        own: dict[str, Any] = {name: kinds[name](value) for name, _, value in said if name in kinds}
        return cls(**own), [argument for argument, (name, _, _) in zip(arguments, said, strict=True) if name not in kinds]

    @property
    def context(self) -> int:
        """Tokens of prompt and response, and some: what is decoded may be encoded otherwise."""
        return self.prompt_tokens + self.response_tokens + 16


def write_prompts(case: Case) -> Path:
    """As many for each step, of words that are a token or two each, cut to the same number of tokens."""
    from transformers import AutoTokenizer

    tokenizer, draw = AutoTokenizer.from_pretrained(case.model), random.Random(SEED)
    words = ["river", "stone", "seven", "green", "paper", "music", "winter", "number", "garden", "window"]
    path = Path(case.folder) / "prompts.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for _ in range(case.prompts * case.steps):
            ids = tokenizer(" ".join(draw.choices(words, k=case.prompt_tokens)))["input_ids"][: case.prompt_tokens]
            file.write(json.dumps({"prompt": tokenizer.decode(ids), "label": ""}) + "\n")
    (path.parent / "reward_hash.py").write_text(REWARD)
    return path


def run_rlbatch(case: Case, keys: list[str], number: int) -> dict[str, list[float]]:
    """Seconds of each phase in each step but the first."""
    run_dir = Path(case.folder) / f"rlbatch_{number}"
    command = [
        *(sys.executable, "-m", "rlbatch.submit", "experiment=hf", f"model.hf={case.model}", f"data.train={case.folder}/prompts.jsonl"),
        *(f"plugins=[{case.folder}/reward_hash.py]", "reward=hashed", "trackers=[jsonl]", f"run_dir={run_dir}", "layout.world_size=1"),
        *("train.precision=bf16", f"train.steps={case.steps}", f"train.prompts_per_step={case.prompts}", "checkpoint.save_interval=-1"),
        *(f"train.max_tokens_per_gpu={case.tokens}", f"algorithm.group_size={case.samples}", f"algorithm.eps_clip={CLIP}"),
        *("rollout=vllm", f"rollout.max_response_tokens={case.response_tokens}", f"rollout.engine.max_model_len={case.context}"),
        *(f"rollout.options.min_response_tokens={case.response_tokens}", f"rollout.engine.gpu_memory_utilization={case.share}"),
        *(f"rollout.engine.max_num_seqs={case.prompts * case.samples}", "rollout.engine.max_num_batched_tokens=4096"),
        *(f"optimizer.lr={LEARNING_RATE}", "optimizer.lr_warmup_steps=0", "optimizer.lr_schedule=constant", "optimizer.weight_decay=0.0"),
        *keys,
    ]
    subprocess.run(["rm", "-rf", str(run_dir)], check=True)
    subprocess.run(command, check=True)
    found = defaultdict(list)
    for line in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()):
        if line["step"] > 1:
            for tag in (tag for tag in line if tag.startswith("time/")):
                found[tag.removeprefix("time/").removesuffix("_s")].append(line[tag])
    return dict(found)


def run_trl(case: Case, arguments: list[str], number: int) -> dict[str, list[float]]:
    """The same, in a process of its own."""
    path = Path(case.folder) / f"trl_{number}.json"
    subprocess.run([sys.executable, "-m", "benchmarks.trl", f"trl={path}", *arguments], check=True)
    found: dict[str, list[float]] = json.loads(path.read_text())
    return found


def train_by_trl(case: Case, output: str) -> None:
    """What ``run_trl`` starts: writes the seconds."""
    import importlib

    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    steps: list[dict[str, float]] = [defaultdict(float)]

    @contextmanager
    def timed(trainer: Any, name: str) -> Iterator[None]:
        torch.cuda.synchronize()
        started = time.perf_counter()
        yield
        torch.cuda.synchronize()
        steps[-1][name] += time.perf_counter() - started

    for module in map(importlib.import_module, MODULES):
        module.profiling_context = timed  # type: ignore[attr-defined]

    class Timed(GRPOTrainer):  # type: ignore[misc]
        """A step is from the end of the one before to its own: generation, passes, optimizer."""

        def log(self, *arguments: Any, **named: Any) -> None:
            torch.cuda.synchronize()
            steps[-1]["until"] = time.perf_counter()
            steps.append(defaultdict(float))
            super().log(*arguments, **named)

    rows = [json.loads(line)["prompt"] for line in (Path(case.folder) / "prompts.jsonl").read_text().splitlines()]
    config = GRPOConfig(
        output_dir=f"{case.folder}/trl_output",
        per_device_train_batch_size=case.batch,
        gradient_accumulation_steps=case.prompts * case.samples // case.batch,
        num_generations=case.samples,
        max_completion_length=case.response_tokens,
        generation_kwargs={"min_tokens": case.response_tokens, "ignore_eos": True},
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=case.share,
        vllm_max_model_length=case.context,
        vllm_enable_sleep_mode=True,
        vllm_importance_sampling_correction=bool(case.correction),
        temperature=1.0,
        beta=0.0,
        epsilon=CLIP,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        bf16=True,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        max_steps=case.steps,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        shuffle_dataset=False,
        seed=SEED,
    )
    trainer = Timed(
        model=case.model,
        processing_class=AutoTokenizer.from_pretrained(case.model),
        reward_funcs=lambda completions, **_: [float(zlib.crc32(text.encode()) % 2) for text in completions],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in rows]),
    )
    trainer.train()
    ends = [step.pop("until") for step in steps if "until" in step]
    found: dict[str, list[float]] = {"step": [end - start for start, end in pairwise(ends[: case.steps])]}
    for name in sorted({name for step in steps[1 : case.steps] for name in step}):
        found[name] = [step[name] for step in steps[1 : case.steps]]
    Path(output).write_text(json.dumps(found))


def main(arguments: list[str]) -> None:
    """Runs the benchmark."""
    output = next((argument.partition("=")[2] for argument in arguments if argument.startswith("trl=")), "")
    case, keys = Case.of([argument for argument in arguments if not argument.startswith("trl=")])
    if output:
        train_by_trl(case, output)
        return
    write_prompts(case)
    ways = {name: way for name, way in {"TRL": (run_trl, arguments), "rlbatch": (run_rlbatch, keys)}.items() if case.only in ("", name)}
    found: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in ways}
    for number in range(case.rounds):
        for name in list(ways)[:: 1 if number % 2 else -1]:  # neither is always the first
            way, its_own = ways[name]
            for phase, seconds in way(case, its_own, number).items():
                found[name][phase] += seconds
    tokens = case.prompts * case.samples * case.response_tokens
    print(f"{case.prompts} prompts x {case.samples} samples x {case.response_tokens} tokens, {case.rounds} x {case.steps} steps")
    for name, phases in found.items():
        print(f"\n{name}: {tokens / statistics.median(phases['step']):.0f} sampled tokens/s of a whole step")
        for phase, seconds in phases.items():
            print(f"  {phase:<42}{statistics.median(seconds):8.3f}  ({min(seconds):.3f} to {max(seconds):.3f})")


if __name__ == "__main__":
    main(sys.argv[1:])
