"""Shows a plan as lines for a terminal and as JSON. Sizes are in GiB (2^30 bytes), times in seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rlbatch.config.assumptions import SOURCE, sources
from rlbatch.plan.advice import Change
from rlbatch.plan.checkpoint_size import checkpoint_bytes
from rlbatch.plan.engine_memory import GIB
from rlbatch.plan.hardware import GPUS
from rlbatch.plan.job_plan import JobPlan
from rlbatch.plan.layout import stage_chunks
from rlbatch.plan.memory import PHASES, Peak

BILLION = 1e9


def summary(plan: JobPlan) -> Iterator[str]:
    """Yields lines for submit and the dry run: the verdict, what is fullest, and the time of a step."""
    yield f"Plan        {plan.verdict}: {'; '.join(map(str, plan.needs))}"
    if plan.time:
        error = plan.job.config.plan.assume.time_error
        phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in plan.time.phases.items())
        yield (
            f"            a step in {plan.time.seconds:.0f} +- {error * plan.time.seconds:.0f} s ({phases}), MFU {plan.time.mfu:.2f}; "
            "expected, not measured: python -m rlbatch.plan"
        )
    yield from (f"{'Calibrated':<12}{source}" for source in dict.fromkeys(plan.job.config.plan.calibrated.values()))


def _warnings(plan: JobPlan) -> list[str]:
    return [warning for warning in (plan.cache.warning, _unknown_gpu(plan)) if warning]


def _unknown_gpu(plan: JobPlan) -> str:
    """Warning that the GPU's rates, and so step times, are not known, and how to set them; empty if they are, or no GPU is named."""
    cluster = plan.job.config.cluster
    if plan.time or not cluster.gpu or plan.job.config.mode != "train":
        return ""
    return (
        f"cluster.gpu={cluster.gpu}: what it can do is not known, so no time is. Use {' or '.join(GPUS)}, or say "
        "cluster.gpu_bf16_tflops, cluster.gpu_link_gbs and plan.assume.memory_gbs."
    )


def lines(plan: JobPlan, problems: Sequence[str], changes: Sequence[Change]) -> Iterator[str]:
    """Yields all lines of the plan's report."""
    config, model = plan.job.config, plan.model
    yield from summary(plan)
    yield f"Binding     {plan.binding}"
    yield from (f"Warning     {warning}" for warning in _warnings(plan))
    yield from (f"Refused     {problem}" for problem in problems)
    for number, change in enumerate(changes):
        price = f", a step in {change.plan.time.seconds:.0f} s" if change.plan.time else ""
        yield f"{'' if number else 'Would fit':<12}{change}: {'; '.join(map(str, change.plan.needs))}{price}"
    if not (plan.has_room or changes):
        yield "Would fit   nothing of what was tried on as many GPUs; min_gpus=true says how many would do"
    yield ""
    total = model.total
    yield (f"Parameters  {total.total:,} in all: {total.dense:,} dense, {total.experts:,} of experts; a token meets {model.active:,}")
    yield f"Checkpoint  {checkpoint_bytes(total.total, config.train.precision) / BILLION:,.0f} GB, {_write_s(plan):,.0f} s to write"
    yield f"Cache       {plan.cache.tokens:,} tokens a replica, for {plan.cache.samples} samples at once"
    if plan.time and plan.generated:
        time, generated = plan.time, plan.generated
        yield (
            f"Pipeline    {time.microbatches} microbatches an update, bubble {time.bubble:.2f}, balance of stages {time.balance:.2f}; "
            f"{generated.tokens_per_second:,.0f} tokens/s generated, {generated.tail_seconds:.0f} s of it with few samples left"
        )
    yield ""
    yield from _stages(plan)
    yield ""
    yield from _parts(plan)
    yield ""
    yield "Assumptions (plan.assume.<name>=<value> for another)"
    yield from (f"  {name}={each['value']:g}: {each['meaning']} ({each[SOURCE]})" for name, each in sources(config.plan).items())


def ranking(found: Sequence[Change]) -> Iterator[str]:
    """Yields a table of jobs that fit, the fastest first, with the phase in which each is faster than the next."""
    yield f"{'':<4}{'step s':>8}{'GPU GiB':>9}{'node GiB':>10}  with"
    for number, change in enumerate(found, 1):
        time, needs = change.plan.time, {need.key: need for need in change.plan.needs}
        assert time is not None
        gpu, node = (needs[key].peak.gib if key in needs else 0.0 for key in ("cluster.gpu_memory_gib", "cluster.host_memory_gib"))
        yield f"{number:<4}{time.seconds:>8.1f}{gpu:>9.1f}{node:>10.1f}  {change if change.keys else 'the job as it is'}"
        after = found[number].plan.time if number < len(found) else None
        if after:
            gains = {phase: after.phases[phase] - seconds for phase, seconds in time.phases.items()}
            phase = max(gains, key=lambda name: gains[name])
            why = f"bubble {time.bubble:.2f} for {after.bubble:.2f}, balance {time.balance:.2f} for {after.balance:.2f}"
            yield f"{'':<31}  beats the next by {gains[phase]:.1f} s of {phase} ({why})"


def _write_s(plan: JobPlan) -> float:
    config = plan.job.config
    return checkpoint_bytes(plan.model.total.total, config.train.precision) / (config.cluster.storage_gbs * BILLION)


def _stages(plan: JobPlan) -> Iterator[str]:
    shown = [phase for phase in PHASES if any(stage.gpu[phase] for stage in plan.memory.expected.stages)]
    title = "".join(f"{phase:>11}" for phase in shown)
    yield f"{'Stage':<6}{'layers':<18}{'dense':>15}{'experts':>17}  parameters a rank; GiB of a GPU:{title}"
    for number, stage in enumerate(_stage_rows(plan)):
        sizes = "".join(f"{stage['gpu_gib'][phase]:>11.1f}" for phase in shown)
        name = f"{stage['layers']}{' + embedding' * stage['has_embedding']}{' + head' * stage['has_head']}"
        yield f"{number:<6}{name:<18}{stage['dense']:>15,.0f}{stage['experts']:>17,.0f}{'':>33}{sizes}"


def _parts(plan: JobPlan) -> Iterator[str]:
    """Yields the parts of the fullest GPU and of the fullest node in each phase."""
    if plan.job.on_gpu:
        yield "A GPU, in the stage that has most"
        for phase in PHASES:
            yield _peak_line(max(_gpu_peaks(plan, phase), key=lambda found: found[0].gib), phase)
    yield "A node, of those the fullest"
    for phase in PHASES:
        yield _peak_line(plan.memory.host(plan.nodes, phase), phase)


def _peak_line(found: tuple[Peak, float], phase: str) -> str:
    peak, spread = found
    return f"  {phase:<11}{peak.gib:8.1f} +- {spread:<5.1f} {peak.parts_listed()}"


def _gpu_peaks(plan: JobPlan, phase: str) -> list[tuple[Peak, float]]:
    return [plan.memory.gpu_of_stage(stage, phase) for stage in range(len(plan.memory.expected.stages))]


def _stage_rows(plan: JobPlan) -> list[dict[str, Any]]:
    """A row for each pipeline stage: its layers, the parameters of a rank, and a GPU's memory in GiB by phase and part."""
    layout, rows = plan.job.config.layout, []
    shares = plan.model.shares(layout)
    for number, chunks in enumerate(stage_chunks(layout, plan.model.family.num_layers)):
        peaks = {phase: plan.memory.gpu_of_stage(number, phase)[0] for phase in PHASES}
        rows.append(
            {
                "layers": sum(map(len, chunks)),
                "has_embedding": number == 0,
                "has_head": number == layout.pp_size - 1,
                "parameters": shares[number].held,
                "dense": shares[number].held - shares[number].experts,
                "experts": shares[number].experts,
                "gpu_gib": {phase: peak.gib for phase, peak in peaks.items()},
                "gpu_parts_gib": {phase: _gib(peak) for phase, peak in peaks.items()},
            }
        )
    return rows


def _gib(peak: Peak) -> dict[str, float]:
    return {name: size / GIB for name, size in peak.parts.items()}


def change_json(change: Change) -> dict[str, Any]:
    """A change with which a job fits, as JSON."""
    return {
        "keys": dict(change.keys),
        "needs": list(map(str, change.plan.needs)),
        "step_seconds": change.plan.time.seconds if change.plan.time else None,
    }


def as_json(plan: JobPlan, problems: Sequence[str], changes: Sequence[Change]) -> dict[str, Any]:
    """The whole plan as JSON, with names that stay the same between versions."""
    config, total, time = plan.job.config, plan.model.total, plan.time
    host = {phase: plan.memory.host(plan.nodes, phase) for phase in PHASES}
    gpu = plan.memory.gpu() if plan.job.on_gpu else None
    return {
        "verdict": plan.verdict,
        "binding": str(plan.binding),
        "problems": [*problems, *_warnings(plan)],
        "changes": [change_json(change) for change in changes],
        "parameters": {"total": total.total, "active": plan.model.active, "dense": total.dense, "experts": total.experts},
        "stages": _stage_rows(plan),
        "gpu_gib_peak": gpu[1].gib if gpu else None,
        "gpu_gib_error": gpu[2] if gpu else None,
        "host_gib_per_node": max(peak.gib for peak, _ in host.values()),
        "host_gib_error": max(host.values(), key=lambda found: found[0].gib)[1],
        "host_parts_gib": {phase: _gib(peak) for phase, (peak, _) in host.items()},
        "checkpoint_gb": checkpoint_bytes(total.total, config.train.precision) / BILLION,
        "checkpoint_write_seconds": _write_s(plan),
        "cache": {
            "tokens_per_replica": plan.cache.tokens,
            "samples_at_once": plan.cache.samples,
            "tokens_needed": plan.cache.needed,
            "tokens_needed_at_most": plan.cache.needed_most,
        },
        "step_seconds": time.seconds if time else None,
        "step_seconds_error": config.plan.assume.time_error * time.seconds if time else None,
        "phase_seconds": time.phases if time else None,
        "microbatches": time.microbatches if time else None,
        "bubble": time.bubble if time else None,
        "balance": time.balance if time else None,
        "mfu": time.mfu if time else None,
        "generated_tokens_per_second": plan.generated.tokens_per_second if plan.generated else None,
        "assumptions": sources(config.plan),
    }
