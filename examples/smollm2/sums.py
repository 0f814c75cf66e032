"""Writes one-digit sums as chat prompts: train.jsonl and eval.jsonl.

python examples/smollm2/sums.py FOLDER [--seed N]

No two numbers of a held-out sum meet in a training prompt, in either order; two of the eight wordings are held out too.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

SYSTEM = "Answer with just the number."
WORDINGS = (
    "What is {a} + {b}?",
    "What is {a} plus {b}?",
    "Add {a} and {b}.",
    "Calculate {a} + {b}.",
    "{a} + {b} =",
    "What is the sum of {a} and {b}?",
)
HELD_OUT_WORDINGS = ("How much is {a} plus {b}?", "Compute the sum: {a} + {b}")
HELD_OUT_PAIRS = 12
"""Of the 55 unordered pairs of digits."""

Pair = tuple[int, int]


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description="One-digit sums as chat prompts: train.jsonl and eval.jsonl.")
    parser.add_argument("folder", type=Path, help="Where the two files go; made if it does not exist.")
    parser.add_argument("--seed", type=int, default=0, help="Chooses the held-out pairs.")
    arguments = parser.parse_args()
    write(arguments.folder, arguments.seed)


def write(folder: Path, seed: int) -> None:
    """Writes both files."""
    folder.mkdir(parents=True, exist_ok=True)
    train, held_out = split(seed)
    for name, content in (("train", rows(train, WORDINGS)), ("eval", rows(held_out, WORDINGS + HELD_OUT_WORDINGS))):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")


def split(seed: int) -> tuple[list[Pair], list[Pair]]:
    """Ordered pairs for training and held-out ones; a pair and its mirror image are on the same side."""
    pairs = [(a, b) for a in range(10) for b in range(a, 10)]
    random.Random(seed).shuffle(pairs)
    return _both_orders(pairs[HELD_OUT_PAIRS:]), _both_orders(pairs[:HELD_OUT_PAIRS])


def _both_orders(pairs: Sequence[Pair]) -> list[Pair]:
    return sorted({*pairs, *((b, a) for a, b in pairs)})


def rows(pairs: Iterable[Pair], wordings: Sequence[str]) -> list[dict[str, Any]]:
    """Every pair in every wording, with its sum as the label."""
    return [
        {
            "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": wording.format(a=a, b=b)}],
            "label": a + b,
        }
        for a, b in pairs
        for wording in wordings
    ]


if __name__ == "__main__":
    main()
