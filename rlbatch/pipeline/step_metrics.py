"""Computes the metrics of a step; their tags are defined in ``rlbatch.metrics.names``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import psutil
import torch
import torch.distributed as dist

from rlbatch.algorithms.advantages import Advantages
from rlbatch.api import Microbatch, PluginError, RolloutError, SampleGroup
from rlbatch.collectives import gathered
from rlbatch.config.schema import Config
from rlbatch.megatron import parallel
from rlbatch.metrics import mfu
from rlbatch.metrics.phases import PhaseClock
from rlbatch.pipeline.exchange import Batch
from rlbatch.pipeline.job import Job
from rlbatch.pipeline.logprob_limit import FACTOR, LogprobLimit
from rlbatch.pipeline.mismatch import compared_tokens
from rlbatch.pipeline.rollout import Work
from rlbatch.pipeline.updates import Update
from rlbatch.plan.flops import forward_flops, training_flops

GIB = 2**30
TOLERANCE = 1e-6
"""Largest accepted rounding error of a mean of zeros and ones."""


def samples(batch: Batch, advantages: Advantages | None) -> dict[str, float]:
    """Tags of the step's rewards, advantages (None: there are none) and response lengths."""
    rewards, lengths = batch.rewards, batch.response_lengths.float()
    metrics = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(correction=0)),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        "response/clip_ratio": float(batch.truncated.float().mean()),
    }
    if advantages is None:
        return metrics
    return metrics | dict(zip(("advantage/mean", "advantage/abs_mean"), advantages.means(), strict=True))


def verdicts(job: Job, groups: Sequence[SampleGroup]) -> dict[str, float]:
    """Tags of samples without a verdict, and of the mean of each named part of rewards over the samples that have it; a collective."""
    counts, job.scorer.counts = job.scorer.counts, Counter()
    sums: dict[str, list[float]] = {}
    for parts in (parts for group in groups for parts in group.parts):
        for name, value in parts.items():
            total = sums.setdefault(name, [0.0, 0.0])
            total[0], total[1] = total[0] + value, total[1] + 1
    said = gathered([counts["error"], counts["timeout"], sums])
    metrics = {"reward/errors": float(sum(errors for errors, _, _ in said)), "reward/timeouts": float(sum(late for _, late, _ in said))}
    for name in sorted({name for _, _, of_rank in said for name in of_rank}):
        found = [of_rank[name] for _, _, of_rank in said if name in of_rank]
        metrics[f"reward/{name}"] = sum(total for total, _ in found) / sum(count for _, count in found)
    return metrics


def updates(made: Sequence[tuple[Update, Mapping[str, float]]], planned: int, *, with_kl: bool) -> dict[str, float]:
    """Tags of means over the updates ``made`` (each with its result of ``Trainer.update``), and of how many of ``planned`` were skipped."""
    skipped = {"train/skipped_updates": float(planned - len(made))}
    if not made:
        return skipped
    tokens, results = float(sum(update.tokens for update, _ in made)) or 1.0, [result for _, result in made]

    def per_token(name: str) -> float:
        return sum(result[name] for result in results) / tokens

    def per_update(name: str) -> float:
        return sum(result[name] for result in results) / len(results)

    metrics = {
        "train/loss": per_update("loss"),
        "train/ppo_kl": per_token("ppo_kl"),
        "train/entropy": per_token("entropy"),
        "train/clip_fraction": per_token("clip_fraction"),
        "train/grad_norm": per_update("grad_norm"),
        "train/lr": results[-1]["lr"],
    }
    return skipped | metrics | ({"train/kl": per_token("kl")} if with_kl else {})


def rollout_mismatch(microbatches: Sequence[Microbatch]) -> dict[str, float]:
    """Differences between log-probs of engine and trainer, nats, on the sampled tokens of all ranks; a collective.

    Args:
        microbatches: Microbatches of this rank, with the trainer's log-probs as old log-probs.
    """
    sums, largest = torch.zeros(2, dtype=torch.float64), torch.zeros(1)
    for microbatch in microbatches:
        assert microbatch.old_logprobs is not None
        compared = compared_tokens(microbatch)
        difference = (microbatch.old_logprobs - microbatch.rollout_logprobs).abs() * compared
        sums += torch.stack([difference.sum(), compared.sum()])
        largest = torch.maximum(largest, difference.max())
    dist.all_reduce(sums, group=parallel.dp_group())
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=parallel.dp_group())
    return {
        "train/rollout_logprob_diff_mean": float(sums[0] / sums[1].clamp(min=1.0)),
        "train/rollout_logprob_diff_max": float(largest),
    }


def check_logprob_difference(config: Config, limit: LogprobLimit, metrics: Mapping[str, float]) -> dict[str, float]:
    """Ends the run if engine and trainer differ by more than ``rollout.max_logprob_diff``.

    Returns:
        Tag of the limit if it was measured; else none.

    Raises:
        RolloutError: the difference is too large; with both numbers.
    """
    given, mean = config.rollout.max_logprob_diff, metrics.get("train/rollout_logprob_diff_mean", 0.0)
    if limit.value is not None and not mean <= limit.value:
        said = (
            f"{given:g}" if given != "auto" else f"auto: at most {limit.value:.3g} nats, {FACTOR:g} times what rounding does to this model"
        )
        raise RolloutError(
            f"rollout.max_logprob_diff={said}: trainer and engine differ by {mean:.3g} nats on average. Check rollout.sync_weights and "
            "that the engine supports this model exactly; raise the limit if its precision is lower."
        )
    return {} if given != "auto" or limit.value is None else {"train/rollout_logprob_diff_limit": limit.value}


def check_clip_fraction(config: Config, metrics: Mapping[str, float]) -> None:
    """Refuses a clip fraction of a policy loss that is outside of 0 to 1.

    Raises:
        PluginError: the loss returned an impossible fraction, which the message has.
    """
    share = metrics.get("train/clip_fraction", 0.0)
    if not -TOLERANCE <= share <= 1 + TOLERANCE:
        raise PluginError(
            f"algorithm.loss={config.algorithm.loss}: clipped is {share:.6g} on average, must be from 0 to 1. "
            "Return 1 where the clip removed the gradient, else 0."
        )


def speed(job: Job, batch: Batch, clock: PhaseClock, scored: Sequence[Update]) -> dict[str, float]:
    """Tags of times, throughput and model FLOPs utilisation.

    Args:
        job: This rank's part of the job.
        batch: Samples of the step.
        clock: Clock of the step.
        scored: Updates whose samples had a forward pass for their old log-probs.
    """
    seconds, world_size, lengths = clock.total(), job.config.layout.world_size, batch.lengths
    per_second = sum(lengths) / seconds
    forwards = [lengths[i] for update in scored for share in update.shares for i in share] + job.needs_reference * lengths
    flops = job.config.train.epochs * training_flops(job.family, lengths) + forward_flops(job.family, forwards)
    trained = clock.seconds("logprobs", "update")
    return clock.tags() | {
        "time/step_s": seconds,
        "perf/tokens_per_s": per_second,
        "perf/tokens_per_s_per_gpu": per_second / world_size,
        "perf/mfu": mfu.mfu(flops, trained, world_size, mfu.peak_flops(job.device, job.config.cluster.gpu_bf16_tflops)),
    }


def generation(job: Job) -> dict[str, float]:
    """Tags of the step's generation over all engines: idle time in its long tail, and speed; a collective."""
    work, job.rollout.work = job.rollout.work, Work()
    sums = torch.tensor([work.busy_s, float(job.rollout.generates), work.tokens], dtype=torch.float64)
    largest = torch.tensor([work.busy_s, work.longest_s], dtype=torch.float64)
    dist.all_reduce(sums)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    (busy_s, engines, tokens), (slowest_s, longest_s) = sums.tolist(), largest.tolist()
    metrics = {"rollout/engine_restarts": float(job.rollout.restarts.total())}
    if tokens:  # else all groups were on disk
        metrics["rollout/idle_fraction"] = 1 - busy_s / (engines * slowest_s)
        metrics["rollout/tokens_per_s"] = tokens / slowest_s
    return metrics | ({"rollout/longest_sample_s": longest_s} if longest_s else {})


def memory(clock: PhaseClock) -> dict[str, float]:
    """Tags of the memory of this process, and of its GPU."""
    return {"memory/rss_gib": psutil.Process().memory_info().rss / GIB} | clock.memory.tags()
