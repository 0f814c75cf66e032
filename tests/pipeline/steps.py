"""Real steps of the embedded model on the ranks of a pool: what the step tests run, and what they get back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlbatch.algorithms.correction import correct
from rlbatch.algorithms.objective import LossPart, Objective
from rlbatch.api import PluginError, PolicyLossInputs, PolicyLossOutputs, RlbatchError, RolloutError
from rlbatch.config.compose import compose
from rlbatch.config.keys import EMBEDDED
from rlbatch.config.schema import Config
from rlbatch.launch.membership.store import JobStore
from rlbatch.launch.membership.watchdog import Watchdog
from rlbatch.launch.ranks.rank_info import RankInfo
from rlbatch.pipeline.assemble import assemble
from rlbatch.pipeline.job import Job
from rlbatch.pipeline.step import train_step
from rlbatch.prompts.embedded import write_embedded_task, write_random_weights

SMALL = (
    "train.steps=4",
    "train.prompts_per_step=8",
    "train.updates_per_step=2",
    "train.max_tokens_per_gpu=40",
    "algorithm.group_size=4",
    "optimizer.lr_schedule=constant",
    "data.eval=",
)
LAYOUTS = {
    "1 rank": ("layout.world_size=1", "layout.ep_size=1"),
    "dp2": ("layout.ep_size=1",),
    "ep2": ("layout.ep_size=2",),
    "pp2": ("layout.ep_size=1", "layout.pp_size=2"),
    "tp2": ("layout.ep_size=1", "layout.tp_size=2", "layout.etp_size=2"),
    "tp2 ep2": ("layout.ep_size=2", "layout.tp_size=2"),
}


def small_config(layout: str, *overrides: str) -> Config:
    """The embedded run, a few samples a step."""
    return compose([*SMALL, *LAYOUTS[layout], *overrides])


def prepared(run_dir: Path, seed: int = 0) -> Path:
    """A run folder with the embedded task and weights, as submit and rank 0 make it."""
    write_embedded_task(run_dir / EMBEDDED, seed)
    write_random_weights(run_dir / EMBEDDED / "model", seed)
    return run_dir


_jobs = count()


def job_of(config: Config, run_dir: str) -> Job:
    """This rank's part of the job."""
    rank, size = dist.get_rank(), dist.get_world_size()
    info = RankInfo(rank, size, rank, size, 0, "test", master_addr="127.0.0.1", master_port=0)
    # What ranks said where an earlier job's met stays on the pool's store.
    store = JobStore(dist.PrefixStore(f"job {next(_jobs)}", dist.distributed_c10d._get_default_store()), info)
    return assemble(config, Path(run_dir), "cpu", store, Watchdog(config.launch), lambda text: None)


@dataclass
class Steps:
    """What this rank saw.

    Attributes:
        metrics: Of each step.
        samples: Of each step: (prompt id, sample index) -> token ids, of this rank's groups.
        advantages: Of each step: the same keys -> mean advantage.
    """

    metrics: list[dict[str, float]]
    samples: list[dict[tuple[int, int], list[int]]]
    advantages: list[dict[tuple[int, int], float]]


def steps(config: Config, run_dir: str, count: int) -> Steps:
    """Runs the first ``count`` steps."""
    return run_steps(job_of(config, run_dir), count)


def run_steps(job: Job, count: int, first: int = 1) -> Steps:
    """Runs steps ``first``, ``first + 1``, ..."""
    result = Steps([], [], [])
    for step in range(first, first + count):
        done, groups, advantages = train_step(job, step)
        keys = [(group.prompt.prompt_id, sample.sample_index) for group in groups for sample in group.samples]
        result.metrics.append(dict(done.metrics))
        result.samples.append({key: s.token_ids.tolist() for key, s in zip(keys, (s for g in groups for s in g.samples), strict=True)})
        result.advantages.append(dict(zip(keys, advantages, strict=True)))
    return result


def merged(ranks: Sequence[dict[Any, Any]]) -> dict[Any, Any]:
    """All ranks' parts as one, in key order; no key twice."""
    keys = [key for rank in ranks for key in rank]
    assert len(keys) == len(set(keys))
    return {key: rank[key] for key in sorted(keys) for rank in ranks if key in rank}


def ratios(config: Config, run_dir: str, count: int) -> tuple[list[float], list[float], Steps]:
    """Runs the first steps. Importance ratios at every unmasked token of the first one: of its first update, of its later updates."""
    job = job_of(config, run_dir)
    seen: list[torch.Tensor] = []

    def recording(inputs: PolicyLossInputs) -> PolicyLossOutputs:
        seen.append((inputs.logprobs.detach() - inputs.old_logprobs).exp()[inputs.old_logprobs != 0])
        return job.objective.policy_loss(inputs)

    boundaries: list[int] = []
    trainer_update = job.trainer.update

    def update(*arguments: Any) -> dict[str, float]:
        result = trainer_update(*arguments)
        boundaries.append(len(seen))
        return result

    job.trainer.update = update
    done = run_steps(replace(job, objective=Objective(config.algorithm, recording)), count)
    first, later = seen[: boundaries[0]], seen[boundaries[0] : boundaries[config.train.updates_per_step - 1]]
    return (*(torch.cat([torch.empty(0), *part]).tolist() for part in (first, later)), done)


@dataclass
class Passes:
    """What the updates of one step got on this rank.

    Attributes:
        tokens: Of each update: (advantage, old, engine's, reference log-prob, weight, log-prob now) at each unmasked token, sorted.
        scored: How often the trainer was asked for log-probs.
        metrics: Of the step.
        had_old: Of each update, whether old log-probs were there before its forward pass.
    """

    tokens: list[list[tuple[float, ...]]]
    scored: int
    metrics: dict[str, float]
    had_old: list[bool]


def passes(config: Config, run_dir: str) -> Passes:
    """One step, whose reference model is loaded."""
    job, calls, seen = job_of(config, run_dir), count(), Passes([], 0, {}, [])
    trainer_update, logprobs = job.trainer.update, job.trainer.logprobs

    def update(microbatches: Any, objective: Any, denominator: float, known: Any = None) -> dict[str, float]:
        tokens: list[tuple[float, ...]] = []

        def told(own: list[torch.Tensor]) -> None:
            for m, now in zip(microbatches, own, strict=True):
                whole = replace(m, old_logprobs=now if m.old_logprobs is None else m.old_logprobs)
                weights = correct(whole, config.correction).weights
                values = (m.advantages, whole.old_logprobs, m.rollout_logprobs, m.ref_logprobs, weights.float(), now)
                tokens.extend(map(tuple, torch.stack(values)[:, m.loss_mask > 0].T.tolist()))
            if known is not None:
                known(own)

        seen.had_old.append(all(m.old_logprobs is not None for m in microbatches))
        result = trainer_update(microbatches, objective, denominator, told)
        seen.tokens.append(sorted(tokens))
        return result

    def scoring(microbatches: Any) -> list[torch.Tensor]:
        next(calls)
        return logprobs(microbatches)

    job.trainer.update, job.trainer.logprobs = update, scoring
    seen.metrics = run_steps(job, 1).metrics[0]
    seen.scored = next(calls)
    return seen


def routed(config: Config, run_dir: str) -> tuple[list[list[tuple[float, ...]]], dict[str, float]]:
    """One step: of each of its updates (token, engine's log-prob, its experts ...) at each unmasked token that is not its response's last,
    sorted; and its metrics.
    """
    job, seen = job_of(config, run_dir), []
    trainer_update = job.trainer.update

    def update(microbatches: Any, *arguments: Any) -> dict[str, float]:
        tokens: list[tuple[float, ...]] = []
        for m in microbatches:
            if m.routes is not None:
                values = torch.cat([m.token_ids[:, None], m.rollout_logprobs[:, None], m.routes.experts.flatten(1)], 1)
                tokens += map(tuple, values[(m.loss_mask > 0) & (m.loss_mask.roll(-1) > 0)].tolist())
        seen.append(sorted(tokens))
        return trainer_update(microbatches, *arguments)

    job.trainer.update = update
    return seen, run_steps(job, 1).metrics[0]


def with_other_routes(config: Config, run_dir: str, how: str) -> dict[str, float] | str:
    """One step whose engine tells other experts: the ``next`` ones, ``none``, or those of ``some`` tokens; its metrics, or the error."""
    job = job_of(config, run_dir)
    engine = job.rollout._backend
    generate = engine.generate

    def other(completion: Any) -> Any:
        routes = completion.routes
        if how == "some":
            routes[::2] = -1
        return replace(completion, routes=None if how == "none" else (routes + 1) % 4 if how == "next" else routes)

    engine.generate = lambda *asked: ([other(completion) for completion in group] for group in generate(*asked))
    try:
        return run_steps(job, 1).metrics[0]
    except RolloutError as error:
        return str(error)


def reference_is_the_first_policy(config: Config, run_dir: str) -> dict[str, Any]:
    """Measures, with the policy as its own reference, what the reference gives before and after updates."""
    from rlbatch.testing.gradients import my_packs

    job = job_of(config, run_dir)
    packs = [replace(pack.microbatch, token_ids=pack.microbatch.token_ids % job.family.vocab_size) for pack in my_packs(config.layout, 40)]

    def logprobs() -> torch.Tensor:
        return torch.cat(job.trainer.logprobs(packs))

    def by_reference() -> torch.Tensor:
        with job.trainer.reference():
            return logprobs()

    policy_before, reference_before = logprobs(), by_reference()
    metrics = run_steps(job, 2).metrics
    weights = {name: param.detach().clone() for name, param in job.trainer.params.items()}
    policy_after, reference_after = logprobs(), by_reference()
    return {
        "metrics": metrics,
        "equal before": torch.equal(policy_before, reference_before),
        "reference unchanged": torch.equal(reference_before, reference_after),
        "difference after": float((policy_after - reference_after).abs().max()),
        "restored": all(torch.equal(param, weights[name]) for name, param in job.trainer.params.items()),
    }


def refused_step(config: Config, run_dir: str, count: int) -> tuple[str, int]:
    """The message of the RolloutError that ends one of the first steps (empty if none does), and how many updates were made."""
    job = job_of(config, run_dir)
    try:
        run_steps(job, count)
    except RolloutError as error:
        return str(error), job.trainer.policy_version
    return "", job.trainer.policy_version


def refused_engine(config: Config, run_dir: str, name: str, factor: float) -> tuple[str, int]:
    """``refused_step`` of the first three where one of the engine's parameters is another after each sync."""
    job = job_of(config, run_dir)
    backend: Any = job.rollout._backend
    take = backend.update_weights

    def take_and_spoil(buckets: Any) -> None:
        take(buckets)
        with torch.no_grad():
            dict(backend._model.named_parameters())[name][0].mul_(factor)

    backend.update_weights = take_and_spoil
    try:
        run_steps(job, 3)
    except RolloutError as error:
        return str(error), job.trainer.policy_version
    return "", job.trainer.policy_version


def with_and_without_a_pass(config: Config, run_dir: str, count: int) -> list[tuple[list[dict[str, float]], dict[str, torch.Tensor], int]]:
    """Steps of two jobs, the second with an estimator that asks for log-probs: metrics, weights, and how many packs were scored."""
    seen = []
    for is_asked in (False, True):
        job = job_of(config, run_dir)
        calls, logprobs = [], job.trainer.logprobs
        job.trainer.logprobs = lambda microbatches, calls=calls, logprobs=logprobs: calls.extend(microbatches) or logprobs(microbatches)
        metrics = run_steps(replace(job, needs_logprobs=is_asked), count).metrics
        seen.append((metrics, {name: param.detach().clone() for name, param in job.trainer.params.items()}, len(calls)))
    return seen


def sync_stops_after_a_step(config: Config, run_dir: str) -> list[dict[str, float]]:
    """Metrics of two steps with weight sync and of a third without."""
    job = job_of(config, run_dir)
    before = run_steps(job, 2).metrics
    job.rollout._config = replace(config, rollout=replace(config.rollout, sync_weights=False))
    return before + run_steps(job, 1, first=3).metrics


def penalised_rewards(config: Config, run_dir: str) -> tuple[Steps, dict[tuple[int, int], float]]:
    """A step whose advantage is the penalised reward itself, and the rewards of this rank's samples."""
    job = job_of(config, run_dir)
    rewards: dict[tuple[int, int], float] = {}
    reward = job.scorer.in_rank[config.reward.name]

    def recording(samples: Any) -> list[float]:
        values = list(reward(samples))
        rewards.update({(s.prompt.prompt_id, s.sample_index): value for s, value in zip(samples, values, strict=True)})
        return values

    job.scorer.in_rank = {config.reward.name: recording}
    job = replace(job, estimator=lambda inputs: inputs.rewards)
    return run_steps(job, 1), rewards


def estimated_differently(config: Config, run_dir: str) -> str:
    """The message that ends a step whose estimator answers by rank."""
    job = job_of(config, run_dir)
    try:
        run_steps(replace(job, estimator=lambda inputs: inputs.rewards + dist.get_rank()), 1)
    except PluginError as error:
        return str(error)
    return ""


def lost_differently(config: Config, run_dir: str, size: float) -> tuple[str, int]:
    """The message that ends a step whose policy loss differs by rank by that much, and how many updates were made."""
    job = job_of(config, run_dir)
    policy_loss = job.objective.policy_loss

    def by_rank(inputs: PolicyLossInputs) -> PolicyLossOutputs:
        outputs = policy_loss(inputs)
        return replace(outputs, losses=outputs.losses + size * dist.get_rank() * inputs.logprobs)

    try:
        run_steps(replace(job, objective=Objective(config.algorithm, by_rank)), 1)
    except PluginError as error:
        return str(error), job.trainer.policy_version
    return "", job.trainer.policy_version


def not_finite(config: Config, run_dir: str, what: str, count: int) -> tuple[list[dict[str, float]], list[str], str, bool]:
    """Steps in which one value is NaN on the last rank: of the policy loss (``loss``) after a while, or of the second step's log-probs, by
    a pass before its updates, or by its first update (``own log-prob``).

    Returns:
        Metrics, what was told, the error that ended them, and whether the last error or step left all weights finite.
    """
    told: list[str] = []
    job = job_of(config, run_dir)
    job.health.announce = told.append
    is_there, calls = dist.get_rank() == dist.get_world_size() - 1, iter(range(10**6))
    policy_loss, logprobs = job.objective.policy_loss, job.trainer.logprobs

    def broken_loss(inputs: PolicyLossInputs) -> PolicyLossOutputs:
        outputs = policy_loss(inputs)
        places = (inputs.old_logprobs != 0).nonzero()
        if not is_there or not len(places) or next(calls) < 3:
            return outputs
        return replace(outputs, losses=outputs.losses * torch.ones_like(outputs.losses).index_fill(0, places[0], torch.nan))

    def broken_logprobs(microbatches: Any) -> list[torch.Tensor]:
        values = logprobs(microbatches)
        if is_there and next(calls) == 1:
            values[0][microbatches[0].loss_mask.argmax()] = torch.nan
        return values

    class BrokenForward(Objective):
        def __call__(self, logprobs: torch.Tensor, entropy: torch.Tensor, microbatch: Any, *arguments: Any) -> LossPart:
            places = microbatch.loss_mask.nonzero().flatten()
            is_second = microbatch.old_logprobs is None and job.trainer.policy_version == config.train.updates_per_step
            if is_there and is_second and len(places) and not next(calls):
                logprobs = logprobs.index_fill(0, places[:1], torch.nan)
            return super().__call__(logprobs, entropy, microbatch, *arguments)

    if what == "loss":
        job = replace(job, objective=Objective(config.algorithm, broken_loss))
    elif what == "own log-prob":
        job = replace(job, objective=BrokenForward(config.algorithm, policy_loss))
    else:
        job.trainer.logprobs = broken_logprobs
    metrics, error = [], ""
    try:
        for step in range(1, 1 + count):
            metrics += run_steps(job, 1, first=step).metrics
    except RlbatchError as raised:
        error = str(raised)
    return metrics, told, error, not job.trainer.not_finite()


def cut_step(config: Config, run_dir: str, is_all_cut: bool) -> tuple[dict[str, float], list[tuple[float, int, bool, float]]]:
    """Metrics of a step whose advantage is the estimator's reward, and reward, response tokens, whether it was cut, and advantage (NaN of
    what is left out) of each of this rank's samples.
    """
    job = replace(job_of(config, run_dir), estimator=lambda inputs: inputs.rewards)
    if is_all_cut:
        job.rollout._stops = ()
    done, groups, advantages = train_step(job, 1)
    samples = [(reward, sample) for group in groups for reward, sample in zip(group.rewards, group.samples, strict=True)]
    rows = [(reward, sample.response_length, sample.finish_reason == "length") for reward, sample in samples]
    return dict(done.metrics), [(*row, advantage) for row, advantage in zip(rows, advantages, strict=True)]
