"""Answers of which one in a hundred hangs: a plain loop over math-verify with its own time-outs, and ``reward=math`` in workers.

python -m benchmarks.rewards [answers] [timeout_s]
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from dataclasses import replace

import torch

from rlbatch.api import Prompt, Sample, SampleGroup
from rlbatch.config.schema import Config, RewardConfig
from rlbatch.registry import load_plugins
from rlbatch.rewards.scorer import Scorer

HANG = r"so it is \boxed{9^{9^{9^{9}}}}"


def answers(count: int) -> list[tuple[str, str]]:
    """Label and response; every hundredth hangs, of the others half are right."""
    found = []
    for number in range(count):
        label = rf"\frac{{{number + 1}}}{{7}}"
        right = rf"we get \boxed{{\frac{{{2 * number + 2 + number % 2}}}{{14}}}}"
        found.append((label, HANG if number % 100 == 50 else right))
    return found


def plain(pairs: list[tuple[str, str]], timeout_s: int) -> tuple[float, Counter[float]]:
    """Seconds of the loop, and its verdicts."""
    from math_verify import parse, verify

    started, verdicts = time.monotonic(), Counter[float]()
    for label, response in pairs:
        gold = parse(f"${label}$", parsing_timeout=timeout_s)
        verdicts[float(verify(gold, parse(response, parsing_timeout=timeout_s), timeout_seconds=timeout_s))] += 1
    return time.monotonic() - started, verdicts


def in_workers(pairs: list[tuple[str, str]], timeout_s: float) -> tuple[float, Counter[float], Counter[str]]:
    """The same by a rank's scorer, its start included."""
    none = torch.zeros(0)
    groups = []
    for number, (label, response) in enumerate(pairs):
        prompt = Prompt(number, "", (), label)
        groups.append(SampleGroup(prompt, [Sample(prompt, 0, none, none, none, response, "stop")]))
    started = time.monotonic()
    scorer = Scorer(
        replace(Config(), reward=RewardConfig("math", timeout_s=timeout_s)), load_plugins(), workers=len(os.sched_getaffinity(0))
    )
    for group in groups:
        scorer.submit(group)
    scorer.finish(groups)
    seconds = time.monotonic() - started
    scorer.close()
    return seconds, Counter(group.rewards[0] for group in groups), scorer.counts


def main() -> None:
    """Prints both."""
    count, timeout_s = (int(word) for word in [*sys.argv[1:], *("4096", "5")[len(sys.argv) - 1 :]])
    pairs = answers(count)
    seconds, verdicts, counts = in_workers(pairs, timeout_s)
    print(f"workers: {seconds:.1f} s, {dict(verdicts)}, {dict(counts)}", flush=True)
    loop, plain_verdicts = plain(pairs, timeout_s)
    print(f"loop: {loop:.1f} s, {dict(plain_verdicts)}; workers take {seconds / loop:.3f} of it")


if __name__ == "__main__":
    main()
