"""A step's samples between ranks: ``python -m benchmarks.exchange [ranks=8] [groups=5000] [samples=16] [tokens=300] [updates=1] [...]``.

More arguments: ``tp=1 pp=1``. A fake engine on each rank has its share of the groups, with responses of up to twice that many tokens. What
a step does with them between generation and log-probs is done on gloo: exchange, packs, advantages (``grpo``); then the samples are
written. Prints the seconds of the slowest rank, how many of them a rank had a processor (at most; all, if each rank has one), and by how
much a rank's memory grew at most beyond the samples that it generated.
"""

from __future__ import annotations

import io
import random
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from rlbatch.algorithms.advantages import advantage_inputs, token_advantages
from rlbatch.api import Prompt, Sample, SampleGroup
from rlbatch.config.schema import Config, LayoutConfig, TrainConfig
from rlbatch.megatron import parallel
from rlbatch.metrics.run_log import RunLog
from rlbatch.pipeline.exchange import deal, exchange
from rlbatch.pipeline.loop import all_lines
from rlbatch.pipeline.updates import plan_updates
from rlbatch.rank_pools import RankPool
from rlbatch.registry import load_plugins

PROMPT_TOKENS = 64


def fake_groups(mine: range, samples: int, tokens: int) -> list[SampleGroup]:
    """Groups of random tokens."""
    draw, text = random.Random(mine.start), "word " * tokens
    groups = []
    for number in mine:
        prompt = Prompt(number, f"prompt {number}", tuple(range(PROMPT_TOKENS)))
        lengths = [draw.randint(1, 2 * tokens - 1) for _ in range(samples)]
        made = [
            Sample(
                prompt,
                index,
                torch.randint(150_000, (PROMPT_TOKENS + length,)),
                torch.tensor([0.0] * PROMPT_TOKENS + [1.0] * length),
                torch.tensor([0.0] * PROMPT_TOKENS + [-1.0] * length),
                f"{index} {text[: 4 * length]}",
                "stop",
            )
            for index, length in enumerate(lengths)
        ]
        groups.append(SampleGroup(prompt, made, [float(draw.random() < 0.5) for _ in made], [{} for _ in made]))
    return groups


def memory(key: str) -> float:
    """``VmRSS``, or its peak ``VmHWM``, in MB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024 / 1e6


def step(config: Config, groups: int, samples: int, tokens: int, run_dir: str) -> dict[str, tuple[float, float, float]]:
    """On this rank, of each part: seconds, those with a processor, and MB of growth."""
    parallel.initialize_groups(config.layout, 0)
    rank, size = dist.get_rank(), dist.get_world_size()
    own = fake_groups(range(rank, groups, size), samples, tokens)
    estimator = load_plugins().build_advantage(config.algorithm)
    log, positions = RunLog(Path(run_dir), 0, rank, io.StringIO()), list(range(rank, groups, size))
    found: dict[str, tuple[float, float, float]] = {}
    before = memory("VmRSS")

    def measured(name: str, started: tuple[float, float]) -> tuple[float, float]:
        used = time.process_time() - started[1]
        dist.barrier()
        found[name] = time.perf_counter() - started[0], used, memory("VmHWM") - before
        Path("/proc/self/clear_refs").write_text("5")
        return time.perf_counter(), time.process_time()

    started = measured("", (0.0, 0.0))
    batch = exchange(own, positions, 0)
    started = measured("numbers", started)
    dealing = partial(deal, batch, group=parallel.dp_group(), sharing=parallel.sharing_groups())
    updates = plan_updates(batch, config, parallel.dp_rank(), parallel.dp_size(), dealing)
    started = measured("tokens, packs", started)
    inputs = advantage_inputs(batch.rewards, batch.group_ids, batch.response_lengths)
    advantages = token_advantages("grpo", estimator, inputs)
    updates = [update.with_advantages(advantages) for update in updates]
    started = measured("advantages", started)
    log.samples(1, all_lines(1, own, [float(advantages[i].mean()) for i in batch.own]))
    measured("samples file", started)
    del found[""]
    return found


def main(arguments: list[str]) -> None:
    """Runs the benchmark."""
    from benchmarks import exchange as module  # its ranks import it by this name

    numbers = {"ranks": 8, "groups": 5000, "samples": 16, "tokens": 300, "updates": 1, "tp": 1, "pp": 1}
    numbers |= {name: int(value) for name, _, value in (argument.partition("=") for argument in arguments)}
    layout = LayoutConfig(world_size=numbers["ranks"], ep_size=1, tp_size=numbers["tp"], pp_size=numbers["pp"])
    train = TrainConfig(prompts_per_step=numbers["groups"], updates_per_step=numbers["updates"], max_tokens_per_gpu=16384)
    config = replace(Config(), layout=layout, train=train)
    pool = RankPool(numbers["ranks"])
    with tempfile.TemporaryDirectory() as run_dir:
        answers = pool.run(module.step, config, numbers["groups"], numbers["samples"], numbers["tokens"], run_dir, timeout_s=3600.0)
        written = sum(path.stat().st_size for path in Path(run_dir).rglob("*.jsonl")) / 1e6
    pool.close()
    print(", ".join(f"{name}={value}" for name, value in numbers.items()))
    for name in answers[0]:
        seconds, used, grown = (max(values) for values in zip(*(answer[name] for answer in answers), strict=True))
        print(f"{name:14} {seconds:6.2f} s, {used:6.2f} s with a processor, {grown:6.0f} MB")
    print(f"{written:.0f} MB of samples were written")


if __name__ == "__main__":
    main(sys.argv[1:])
