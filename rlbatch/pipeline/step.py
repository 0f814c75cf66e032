"""Runs one training step; every rank runs it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from rlbatch.algorithms.advantages import Advantages, advantage_inputs, token_advantages
from rlbatch.algorithms.kl import kl_penalty
from rlbatch.algorithms.overlong import overlong_penalties
from rlbatch.api import Microbatch, PluginError, Routes, SampleGroup, StepResult
from rlbatch.megatron import parallel
from rlbatch.megatron.finite import NotFinite
from rlbatch.metrics.phases import PhaseClock
from rlbatch.pipeline import step_metrics
from rlbatch.pipeline.correction_totals import with_kept_ratio
from rlbatch.pipeline.exchange import Batch, Deal, all_gather_samples, deal, deal_values, exchange
from rlbatch.pipeline.first_policy import FirstPolicy
from rlbatch.pipeline.job import Job
from rlbatch.pipeline.plan_vs_actual import node_used_gib, tell_held
from rlbatch.pipeline.route_checks import Routers
from rlbatch.pipeline.routes import RouteExchange, native_share, of_own, with_routes
from rlbatch.pipeline.sample_finder import SampleFinder
from rlbatch.pipeline.sampling import count_trained, take_groups, without_update
from rlbatch.pipeline.updates import Update, plan_updates, shuffled_groups


def train_step(job: Job, step: int) -> tuple[StepResult, list[SampleGroup], list[float]] | None:
    """Generates, scores and updates; ``step`` counts from 1.

    Returns the step's result with metrics (the same on every rank), this rank's groups, and the mean advantage of each of their samples.
    None on every rank if the job has to stop before the update, with the last step's policy.
    """
    config, clock = job.config, PhaseClock(node_used_gib, partial(tell_held, job))

    with job.stopping.generating(may_finish=True), job.generating(clock):
        with clock.phase("sync"), job.watchdog.phase("training"):
            job.sync_weights()
        taken = take_groups(job, clock, step)
    if taken is None:
        return None
    if not taken.prompts:
        return StepResult(step, job.trainer.policy_version, without_update(job, step, clock, taken)), [], []

    with clock.phase("exchange"):
        with_kept = config.rollout.top_p < 1 or config.rollout.top_k > 0
        batch = exchange(taken.groups, taken.positions, job.rollout.version, with_kept=with_kept)
        scored = batch.without_truncated() if config.algorithm.mask_truncated else batch
        trained = scored.without_old() if config.sampling.old_tokens == "mask" else scored
        of_sampling = count_trained(job, trained)
        updates = _plan(job, trained)
        routed = {"train/native_routes": native_share(batch)} if config.algorithm.routing_replay == "rollout" else {}
        planned = len(updates) * config.train.epochs
        finder = SampleFinder(scored, partial(scored.name, prompts=taken.prompts))

    with job.training(clock):
        with clock.phase("logprobs"):
            first = FirstPolicy(job, updates, finder)
            first.score()
        with clock.phase("exchange"):
            advantages = None if first.broken else _advantages(job, finder, updates)
        with clock.phase("update"):
            job.trainer.next_learning_rate()
            made = [] if advantages is None else _update(job, step, trained, planned, first, advantages)
            if first.broken:
                job.health.pass_over(f"log-probs of step {step} must be finite: {first.broken}", planned)
                advantages = None

    metrics = (
        step_metrics.samples(batch, advantages)
        | step_metrics.verdicts(job, taken.groups)
        | step_metrics.updates(made, planned, with_kl=job.needs_reference)
        | first.metrics
        | ({**taken.metrics, **of_sampling} if taken.metrics else {})
        | step_metrics.generation(job)
        | routed
        | step_metrics.speed(job, batch, clock, first.scored)
        | step_metrics.memory(clock)
    )
    step_metrics.check_clip_fraction(config, metrics)
    job.stopping.step_done()
    shown = [math.nan if advantages is None else float(advantages[i].mean()) for i in batch.own]
    return StepResult(step, job.trainer.policy_version, metrics), taken.groups, shown


def _plan(job: Job, batch: Batch, order: Sequence[int] | None = None, recorded: Mapping[int, Routes] | None = None) -> list[Update]:
    dealing: Deal = partial(deal, batch, group=parallel.dp_group(), sharing=parallel.sharing_groups())
    if recorded is not None or job.config.algorithm.routing_replay == "rollout":
        dealing = with_routes(dealing, RouteExchange(Routers.of(job.family), job.trainer.routed_layers), batch, recorded)
    return plan_updates(batch, job.config, parallel.dp_rank(), parallel.dp_size(), dealing, order)


def _epochs(job: Job, step: int, updates: Sequence[Update], batch: Batch, advantages: Advantages) -> Iterator[Update]:
    """Yields the updates of all epochs, which share the advantages and the log-probs from before the first."""
    yield from (update.with_advantages(advantages) for update in updates)
    if job.config.train.epochs == 1:
        return
    names = ("old_logprobs", "ref_logprobs") if job.needs_reference else ("old_logprobs",)
    logprobs = {name: _of_own(updates, attrgetter(name)) for name in names}
    recorded = of_own(updates) if job.config.algorithm.routing_replay == "recorded" else None
    for epoch in range(1, job.config.train.epochs):
        for update in _plan(job, batch, shuffled_groups(job.config.seed, step, epoch, batch.num_groups), recorded):
            for name, values in logprobs.items():
                update = update.with_logprobs(name, deal_values(values, update.shares, batch.lengths, parallel.dp_group()))
            yield update.with_advantages(advantages)


def _update(
    job: Job, step: int, batch: Batch, planned: int, first: FirstPolicy, advantages: Advantages
) -> list[tuple[Update, dict[str, float]]]:
    """Makes the updates, and returns each with the result of ``Trainer.update``.

    One with values that are not finite ends the run or is skipped; if the first one finds such log-probs, all are skipped.
    """
    made = []
    for number, update in enumerate(_epochs(job, step, first.updates, batch, advantages), start=1):
        packs = [pack.microbatch for pack in update.packs]
        known = partial(first.known, advantages) if number == 1 else None
        try:
            result = job.trainer.update(packs, with_kept_ratio(job.objective, packs), update.denominator, known)
        except NotFinite as error:
            if first.broken:
                return []
            which = f"update {number} of {planned} of step {step} must be finite, {error.found}"
            job.health.pass_over(f"{which}: {first.finder.first(update, error.token)}")
        else:
            job.health.updated()
            made.append((update, result))
    return made


def _advantages(job: Job, finder: SampleFinder, updates: Sequence[Update]) -> Advantages:
    """Estimates the advantages of all N samples, from all of them; a collective.

    Raises:
        PluginError: on every rank, the estimator's result is not valid, or differs between ranks.
    """
    algorithm, batch, lengths = job.config.algorithm, finder.batch, finder.batch.response_lengths
    kept = lengths.nonzero().flatten()
    if not len(kept):
        return Advantages(torch.empty(0), kept, [])
    needs_logprobs = job.needs_logprobs
    inputs = advantage_inputs(
        (batch.rewards + _overlong_penalties(job, lengths))[kept],
        batch.group_ids[kept],
        lengths[kept],
        _responses(batch, updates, partial(_kl, algorithm.kl_kind)) if algorithm.kl_reward_coef else None,
        algorithm.kl_reward_coef,
        truncated=batch.truncated[kept],
        lags=batch.lags[kept],
        old_logprobs=_responses(batch, updates, lambda microbatch: microbatch.old_logprobs) if needs_logprobs else None,
        ref_logprobs=_responses(batch, updates, lambda microbatch: microbatch.ref_logprobs) if needs_logprobs else None,
    )
    found = token_advantages(algorithm.advantage, job.estimator, inputs, lambda index: finder.name(int(kept[index])))
    checksum = crc32(found.values.numpy().tobytes())
    least_and_most = torch.tensor([-checksum, checksum])
    dist.all_reduce(least_and_most, dist.ReduceOp.MAX)
    if int(least_and_most.sum()):
        raise PluginError(
            f"algorithm.advantage={algorithm.advantage}: ranks got different advantages for the same samples. "
            "Seed what the estimator draws, the same on every rank."
        )
    return replace(found, samples=kept.tolist())


def _overlong_penalties(job: Job, lengths: Tensor) -> Tensor:
    """[N] float64 penalties for overlong responses, for all samples of the step."""
    algorithm, most = job.config.algorithm, job.config.rollout.max_response_tokens
    return overlong_penalties(lengths, most, algorithm.overlong_buffer_tokens or max(most // 5, 1), algorithm.overlong_penalty)


def _responses(batch: Batch, updates: Sequence[Update], values: Callable[[Microbatch], Tensor | None]) -> Tensor:
    """[T] float64: one value for every response token of the step; a collective."""
    lengths = batch.response_lengths.tolist()
    mine = {index: of_tokens[len(of_tokens) - lengths[index] :] for index, of_tokens in _of_own(updates, values).items()}
    return torch.cat(all_gather_samples(mine, lengths, parallel.dp_group()))


def _of_own(updates: Sequence[Update], values: Callable[[Microbatch], Tensor | None]) -> dict[int, Tensor]:
    """[L_i] for each sample that this rank trains on, by its index in the batch: one value for each token."""
    mine: dict[int, Tensor] = {}
    for update in updates:
        found = (values(pack.microbatch) for pack in update.packs)
        mine |= update.by_sample([value for value in found if value is not None])
    return mine


def _kl(kind: str, microbatch: Microbatch) -> Tensor:
    assert microbatch.old_logprobs is not None
    assert microbatch.ref_logprobs is not None
    return kl_penalty(kind, microbatch.old_logprobs.double(), microbatch.ref_logprobs.double())
