"""Evaluates the current weights: samples the prompts of all sets, scores the responses, and computes metrics."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any

from rlbatch.algorithms.pass_at_k import majority_at_k, mean_and_error, pass_at_k
from rlbatch.api import Prompt, SampleGroup
from rlbatch.collectives import gather_lines
from rlbatch.config.evaluation import SIMPLE, ks, scores
from rlbatch.first_rank import on_first_rank
from rlbatch.metrics.evaluations import Evaluation
from rlbatch.metrics.phases import PhaseClock
from rlbatch.metrics.report import sample_rows
from rlbatch.pipeline.generation import generate
from rlbatch.pipeline.job import EngineJob
from rlbatch.prompts.eval_sets import EvalSet


@dataclass(frozen=True)
class Evaluated:
    """The results of an evaluation.

    Attributes:
        metrics: Tag -> value, the same on every rank.
        sets: Table and samples of each set; empty on ranks other than 0, which writes them.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    sets: Sequence[Evaluation] = ()


def evaluate(job: EngineJob, step: int) -> Evaluated | None:
    """Samples, scores and measures all sets, in prompt order whichever rank samples what; a collective.

    Returns None on every rank if the job has to stop.
    """
    started = time.perf_counter()
    asked = [(held_out, prompt) for held_out in job.eval_sets for prompt in held_out.prompts]
    mine = [asked[i] for i in job.rollout.share(len(asked))]
    set_of = {id(prompt): held_out for held_out, prompt in mine}

    def sample(prompts: Sequence[Prompt]) -> Iterator[SampleGroup]:
        """Yields set after set; stops when a set is interrupted, or the engine is lost."""
        for held_out in job.eval_sets:
            own = [prompt for prompt in prompts if set_of[id(prompt)] is held_out]
            yield from job.rollout.evaluate(own, held_out.params(job.config.seed))

    clock = PhaseClock()
    with job.stopping.generating(may_finish=False), job.generating(clock):
        with job.watchdog.phase("training"):
            job.sync_weights()
        prompts = [prompt for _, prompt in mine]
        groups = generate(job, clock, prompts, sample, key=id, is_held_out=True)  # prompts of two sets may have one prompt_id
        job.rollout.sleep()
        job.scorer.counts = Counter()  # they are the sets', not the next step's
    if groups is None:
        return None
    rows = (row for group in groups for row in _rows(step, set_of[id(group.prompt)], group))
    parts = gather_lines(json.dumps(row).encode() for row in rows)
    sets = _by_set(job.eval_sets, map(json.loads, chain(*parts)))
    metrics = on_first_rank(lambda: {tag: value for each in sets for tag, value in each.metrics.items()})
    return Evaluated({**metrics, "time/eval_s": time.perf_counter() - started}, sets)


def _rows(step: int, held_out: EvalSet, group: SampleGroup) -> list[dict[str, Any]]:
    """The row to write, the length of the response in tokens, and the answer, for each sample of a group."""
    written = sample_rows(step, [group], [math.nan] * len(group.samples))
    lengths = [sample.response_length for sample in group.samples]
    return [
        {"row": {**row, "advantage": None, "set": held_out.name}, "length": length, "answer": answer}
        for row, length, answer in zip(written, lengths, group.answers, strict=True)
    ]


def _by_set(sets: Sequence[EvalSet], rows: Iterable[Mapping[str, Any]]) -> list[Evaluation]:
    """The evaluation of each set, from the rows of all ranks; empty where there are no rows, on ranks other than 0."""
    by_set: dict[str, list[Mapping[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: (row["row"]["prompt_id"], row["row"]["sample_index"])):
        by_set.setdefault(row["row"]["set"], []).append(row)
    return [measured(held_out, by_set[held_out.name]) for held_out in sets if held_out.name in by_set]


def measured(held_out: EvalSet, rows: Sequence[Mapping[str, Any]]) -> Evaluation:
    """The evaluation of a set, from its samples in order, each with its ``row`` as written, ``length`` in tokens, and ``answer``."""
    name, settings = held_out.name, held_out.settings
    prompts = [list(group) for _, group in groupby(rows, key=lambda row: row["row"]["prompt_id"])]
    rewards = [[row["row"]["reward"] for row in prompt] for prompt in prompts]
    correct = [[row["row"]["reward"] >= settings.correct and "failure" not in row["row"] for row in prompt] for prompt in prompts]
    answers = [[row["answer"] for row in prompt] for prompt in prompts]
    values = {
        f"avg@{settings.n}": [math.fsum(prompt) / len(prompt) for prompt in rewards],
        **{f"pass@{k}": [pass_at_k(prompt, k) for prompt in correct] for k in ks(settings)},
        **{f"majority@{k}": [majority_at_k(*both, k) for both in zip(answers, correct, strict=True)] for k in ks(settings) if k > 1},
        "length_mean": [sum(row["length"] for row in prompt) / len(prompt) for prompt in prompts],
        "truncated": [sum(row["row"]["finish_reason"] == "length" for row in prompt) / len(prompt) for prompt in prompts],
    }
    failures = Counter(row["row"].get("failure") for row in rows)
    unscored = {"errors": failures["error"], "timeouts": failures["timeout"]}
    table = {metric: mean_and_error(of_prompts) for metric, of_prompts in values.items()}
    if name == SIMPLE:
        table = {metric: value for metric, value in table.items() if "pass@" not in metric}
    metrics = {tag: table[metric][0] for tag, metric in scores(name, settings).items()}
    if name != SIMPLE:
        metrics |= {f"eval/{name}/{kind}": float(count) for kind, count in unscored.items()}
        average = f"avg@{settings.n}"
        metrics |= {f"eval/{name}/{metric}": table[metric][0] for metric in ("length_mean", "truncated")}
        metrics |= {f"eval/{name}/{average}_se": table[average][1]} if len(prompts) > 1 else {}
    return Evaluation(name, len(prompts), settings.n, table, unscored, metrics, [row["row"] for row in rows])
