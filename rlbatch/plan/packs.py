"""How many tokens a pack has: where that is left to us (``train.max_tokens_per_gpu=auto``), as many as memory allows.

Larger packs are faster: the products of each expert have more rows, and the experts' gradients are added up less often.
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
"""What is tried. Beyond the first there is little to win."""
ROUNDS = 4
"""Microbatches of an update for each pipeline stage, at least: with fewer, stages wait longer than larger packs save."""
STEP = 512
"""To how many tokens exactly the most that fits is told."""
PHASES = ("log-probs", "update")
"""In which packs take memory."""


def packs_chosen(config: Config, job: MemoryInputs | None) -> tuple[Config, str]:
    """The config with a number for ``auto``, and why that one; empty: a number was given.

    The largest of ``SIZES`` with which every stage's GPU has room for log-probs and updates, the planner's error added, and with which an
    update has ``ROUNDS`` microbatches for each stage of a pipeline. At least the longest sample: that forms a pack anyway. ``DEFAULT_PACK``
    where nothing says what a GPU has.

    Args:
        config: Complete.
        job: Its memory; None: the model cannot be divided so.
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
    """Refuses packs for which a GPU has no room, even less the planner's error, where smaller ones fit.

    Raises:
        ConfigError: the most tokens that fit.
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
    """Tokens of a rank of the longest sample."""
    return -(-workload(config).longest // config.layout.cp_size)


def _unknown(job: MemoryInputs | None) -> str:
    """Why memory does not say what fits; empty: it does."""
    if job is None or job.model is None:
        return "the model is not known"
    if not job.on_gpu:
        return "no GPUs"
    if job.config.mode != "train":
        return "nothing is trained"
    return "" if job.config.cluster.gpu_memory_gib else "cluster.gpu_memory_gib does not say what a GPU has"


def _fits(job: MemoryInputs, tokens: int) -> bool:
    """Whether every GPU has room for packs of so many tokens, the planner's error added."""
    has = job.config.cluster.gpu_memory_gib
    return all(peak.gib + spread <= has for peak, spread in _peaks(replace(job, config=_with(job.config, tokens))))


def _peaks(job: MemoryInputs) -> list[tuple[Peak, float]]:
    memory = estimate_memory(job)
    return [memory.gpu_of_stage(stage, phase) for stage in range(len(memory.expected.stages)) for phase in PHASES]


def _has_rounds(config: Config, job: MemoryInputs) -> bool:
    """Whether no stage of a pipeline waits longer for large packs than they save."""
    assert job.model is not None
    stages, over = config.layout.pp_size, degrees(config.layout, job.model.family.num_layers)
    return stages == 1 or microbatches(config, workload(config), over) >= ROUNDS * stages


def _with(config: Config, tokens: int) -> Config:
    return replace(config, train=replace(config.train, max_tokens_per_gpu=tokens))
