"""Chooses the number of tokens of a pack: as many as memory allows, where ``train.max_tokens_per_gpu`` is ``auto``.

Larger packs are faster: the matrix products of each expert have more rows, and the experts' gradients are added up less often.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

from rlbatch.api import ConfigError
from rlbatch.config.schema import DEFAULT_PACK, Config
from rlbatch.plan.engine_memory import MemoryInputs
from rlbatch.plan.estimate import estimate_memory
from rlbatch.plan.layout import degrees
from rlbatch.plan.memory import WHEN, Peak
from rlbatch.plan.workload import microbatches, workload

SIZES = (32768, 16384, 8192, DEFAULT_PACK)
"""Pack sizes that are tried, tokens, the largest first; beyond that there is little to win."""
ROUNDS = 4
"""Least number of microbatches of an update for each pipeline stage: with fewer, stages wait longer than larger packs save."""
STEP = 512
"""Multiple to which messages round the largest pack that fits down, tokens."""
PHASES = ("log-probs", "update")
"""Phases in which packs take memory."""


def packs_chosen(config: Config, job: MemoryInputs | None) -> tuple[Config, str]:
    """The config with a number in place of ``auto``, and the reason for it; an empty reason if a number was given.

    The number is the largest of ``SIZES`` with which every stage's GPU has room for log-probs and updates, with the planner's error,
    and with which an update has ``ROUNDS`` microbatches for each stage of a pipeline. It is at least the longest sample, which forms
    a pack anyway, and ``DEFAULT_PACK`` where the GPUs' memory is not known.

    Args:
        config: Complete config of the job.
        job: Inputs of the job's memory; None if the model cannot be divided as configured.
    """
    if config.train.max_tokens_per_gpu != "auto":
        return config, ""
    unknown = _unknown(job)
    if unknown or job is None:
        return _with(config, DEFAULT_PACK), unknown
    least = _longest(config)
    sizes = list(dict.fromkeys(max(size, least) for size in SIZES))
    for tokens in sizes:
        if (tokens == sizes[-1] or _has_rounds(_with(config, tokens), job)) and _fits(job, tokens):
            has = f"fits {config.cluster.gpu_memory_gib:g} GiB a GPU"
            return _with(config, tokens), f"{has}; the longest sample has {least} a GPU" if tokens == least else has
    return _with(config, sizes[-1]), f"{'the longest sample' if least == sizes[-1] else 'the least'}, for which memory may not be enough"


def check_packs(job: MemoryInputs) -> None:
    """Refuses packs that do not fit a GPU even without the planner's error, where smaller ones fit.

    Raises:
        ConfigError: the largest number of tokens that fits.
    """
    if _unknown(job):
        return
    peak, spread = max(_peaks(job), key=lambda found: found[0].gib - found[1])
    has, tokens = job.config.cluster.gpu_memory_gib, job.config.train.pack_tokens
    if peak.gib - spread <= has:
        return
    fits = bisect_left(range(tokens // STEP), True, key=lambda steps: not _fits(job, (steps + 1) * STEP)) * STEP
    if fits > _longest(job.config):
        raise ConfigError(
            f"train.max_tokens_per_gpu={tokens}: packs must fit a GPU, {WHEN[peak.phase]} these need {peak.gib:.1f} +- {spread:.1f} GiB of "
            f"{has:g} (cluster.gpu_memory_gib). Use {fits} or less, or auto."
        )


def _longest(config: Config) -> int:
    """Tokens of the longest sample on each rank that shares it."""
    return -(-workload(config).longest // config.layout.cp_size)


def _unknown(job: MemoryInputs | None) -> str:
    """Reason why memory cannot say which packs fit; empty if it can."""
    if job is None or job.model is None:
        return "the model is not known"
    if not job.on_gpu:
        return "no GPUs"
    if job.config.mode != "train":
        return "nothing is trained"
    return "" if job.config.cluster.gpu_memory_gib else "cluster.gpu_memory_gib does not say what a GPU has"


def _fits(job: MemoryInputs, tokens: int) -> bool:
    """Whether packs of so many tokens fit every GPU, with the planner's error."""
    has = job.config.cluster.gpu_memory_gib
    return all(peak.gib + spread <= has for peak, spread in _peaks(replace(job, config=_with(job.config, tokens))))


def _peaks(job: MemoryInputs) -> list[tuple[Peak, float]]:
    memory = estimate_memory(job)
    return [memory.gpu_of_stage(stage, phase) for stage in range(len(memory.expected.stages)) for phase in PHASES]


def _has_rounds(config: Config, job: MemoryInputs) -> bool:
    """Whether an update has enough microbatches that no pipeline stage waits longer than large packs save."""
    assert job.model is not None
    stages, over = config.layout.pp_size, degrees(config.layout, job.model.family.num_layers)
    return stages == 1 or microbatches(config, workload(config), over) >= ROUNDS * stages


def _with(config: Config, tokens: int) -> Config:
    return replace(config, train=replace(config.train, max_tokens_per_gpu=tokens))
