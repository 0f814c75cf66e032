"""The command ``python -m rlbatch.data``: what a job would train on, as the model reads it, and what its rewards say of the labels."""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from rlbatch import reward_parts
from rlbatch.api import ConfigError, DataError, Prompt, RlbatchError
from rlbatch.api.exit_codes import DONE, REFUSED
from rlbatch.config.evaluation import needs_reward
from rlbatch.config.hf_config import read_config
from rlbatch.config.keys import EMBEDDED
from rlbatch.config.schema import Config
from rlbatch.datasets.jsonl import json_type
from rlbatch.datasets.records import read_records
from rlbatch.job_parts import model_folder, write_embedded
from rlbatch.launch.records.streams import end_with_reader, exit_code_of_display, keep_output
from rlbatch.length_picture import bars, write_svg
from rlbatch.prompts.model_folder import load_tokenizer
from rlbatch.prompts.prompt_check import RowChecks
from rlbatch.prompts.prompt_file import PromptRow
from rlbatch.prompts.prompt_sets import PromptSet, held_out_sets, training_sets
from rlbatch.prompts.tokenizing import BATCH_ROWS, Limit, make_prompt, prompt_limit, tokenize_rows
from rlbatch.registry import Registry, compose_job

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

USAGE = """\
Shows what a job would train on: rows, lengths, what is left out and why, types of labels, three prompts as the model reads them, and what
each reward says of its own gold answers. Needs the model's config.json and tokenizer, no weights and no GPU. Starts nothing.

Usage: python -m rlbatch.data [key=value ...]     the same arguments as python -m rlbatch.submit

Writes prompt_lengths.svg, a picture of the lengths, into the current folder.
Exit codes: 0 all rows can be used, 2 some cannot, or the arguments are refused.
"""
PICTURE = "prompt_lengths.svg"
SHOWN_PROMPTS, SHOWN_PLACES, SHOWN_IDS = 3, 3, 24
TOKENIZE_S = 60.0
"""How long the rows of a set are tokenised; the others are only read."""
GOLD_ROWS, GOLD_S = 64, 30.0
"""Rows of which a reward sees the gold answer, and how long it may take for them."""


@dataclass
class Report:
    """What was found in one data set.

    Attributes:
        rows: How many there are.
        lengths: Tokens of each prompt that was tokenised.
        unusable: Reason -> places of rows that cannot be used.
        labels: Types.
        rewards: Name -> rows.
        shown: The first prompts.
        gold: Reward -> rows with labels for it.
    """

    rows: int = 0
    lengths: list[int] = field(default_factory=list)
    unusable: dict[str, list[str]] = field(default_factory=dict)
    labels: Counter[str] = field(default_factory=Counter)
    rewards: Counter[str] = field(default_factory=Counter)
    shown: list[Prompt] = field(default_factory=list)
    gold: dict[str, list[Prompt]] = field(default_factory=dict)

    def refuse(self, place: str, error: RlbatchError) -> None:
        """Counts a row that cannot be used."""
        where, said = str(error).partition(": ")[::2] if str(error).startswith(place) else (place, str(error))
        self.unusable.setdefault(said, []).append(where)


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return DONE
    try:
        config, registry = compose_job(arguments)
        with tempfile.TemporaryDirectory() as scratch:
            write_embedded(config, Path(scratch))
            return show(config, registry, Path(scratch))
    except RlbatchError as error:
        print(error, file=sys.stderr)
        return REFUSED


def show(config: Config, registry: Registry, run_dir: Path) -> int:
    """Prints a report of each set.

    Raises:
        RlbatchError: no model or tokenizer, no room for prompts, a file that cannot be read.
    """
    if not config.reward.name and needs_reward(config):
        raise ConfigError(f"reward=: must be named. Known: {', '.join(sorted(registry.rewards))}; others with plugins=[<file>.py].")
    folder = model_folder(config, run_dir)
    family = registry.resolve_model_family(read_config(folder))
    tokenizer = load_tokenizer(folder, folder)
    pictures: dict[str, list[int]] = {}
    code = DONE
    trained = training_sets(config, run_dir) if config.mode == "train" else []
    for one, own in [*((one, config) for one in trained), *held_out_sets(config, run_dir)]:
        limit = prompt_limit(one.data, family.max_sequence_length, own.rollout.max_response_tokens, one.limit_key)
        report = look(one, own, registry, tokenizer, family.vocab_size)
        print(*_lines(one, report, limit, tokenizer), sep="\n")
        print(*_verdicts(own, registry, report, tokenizer), sep="\n")
        print()
        pictures[one.name or one.key] = report.lengths
        too_long = sum(length > limit[0] for length in report.lengths)
        if report.unusable or (too_long and (one.data.too_long == "refuse" or too_long == len(report.lengths))):
            code = REFUSED
    if any(pictures.values()):
        write_svg(Path(PICTURE), pictures)
        print(f"Picture of the lengths: {PICTURE}")
    return code


def look(one: PromptSet, config: Config, registry: Registry, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> Report:
    """Reads all rows of a set, and tokenises as many as the time allows; raises DataError if a file cannot be read any further."""
    report, checks, batch = Report(), RowChecks(config, registry), list[PromptRow]()
    started = time.monotonic()
    for row in islice(_rows(one, report), one.most or None):
        report.labels[json_type(row.label)] += 1
        report.rewards[row.reward_name or config.reward.name] += 1
        try:
            checks.check(row, one)
        except DataError as error:
            report.refuse(row.place, error)
            continue
        if time.monotonic() - started < TOKENIZE_S:
            batch.append(row)
        if len(batch) == BATCH_ROWS:
            _tokenize(one, batch, report, config, tokenizer, vocab_size)
            batch = []
    _tokenize(one, batch, report, config, tokenizer, vocab_size)
    return report


def _rows(one: PromptSet, report: Report) -> Iterator[PromptRow]:
    reader = one.reader()
    for path in one.paths:
        for line, fields in read_records(path, reader.wanted):
            report.rows += 1
            try:
                row = reader.row(path, line, fields)
            except DataError as error:
                report.refuse(f"{path}:{line}", error)
                continue
            yield row


def _tokenize(
    one: PromptSet, rows: Sequence[PromptRow], report: Report, config: Config, tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> None:
    try:
        tokenized = tokenize_rows(rows, tokenizer, one.data, vocab_size)
    except DataError as error:
        if len(rows) > 1:
            for row in rows:
                _tokenize(one, [row], report, config, tokenizer, vocab_size)
        elif rows:
            report.refuse(rows[0].place, error)
        return
    for row, tokens in zip(rows, tokenized, strict=True):
        prompt = make_prompt(len(report.lengths), row, tokens)
        report.lengths.append(len(prompt.token_ids))
        if len(report.shown) < SHOWN_PROMPTS:
            report.shown.append(prompt)
        if row.label is None:
            continue
        gold = report.gold.setdefault(row.reward_name or config.reward.name, [])
        if len(gold) < GOLD_ROWS:
            gold.append(prompt)


def _lines(one: PromptSet, report: Report, limit: Limit, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    yield f"{one.key if one.source == EMBEDDED else f'{one.key}={one.told}'}: {report.rows} rows"
    lengths = sorted(report.lengths)
    if lengths:
        of = "" if len(lengths) + sum(map(len, report.unusable.values())) >= report.rows else f" of the first {len(lengths)} rows"
        middle = [lengths[int(share * (len(lengths) - 1))] for share in (0, 0.5, 0.9, 0.99, 1)]
        yield f"  tokens{of}: shortest {middle[0]}, median {middle[1]}, 90 % {middle[2]}, 99 % {middle[3]}, longest {middle[4]}"
        yield from (f"    {line}" for line in bars(lengths))
    too_long = sum(length > limit[0] for length in lengths)
    what = "left out" if one.data.too_long == "drop" else "refused"
    yield f"  {what}, longer than {limit[0]} tokens ({limit[1]}): {too_long}"
    for said, places in report.unusable.items():
        yield f"  cannot be used: {len(places)} ({', '.join(places[:SHOWN_PLACES])}{', ...' if len(places) > SHOWN_PLACES else ''}): {said}"
    yield f"  labels: {_counts(report.labels)}"
    yield f"  rewards: {_counts(report.rewards)}"
    for number, prompt in enumerate(report.shown, start=1):
        ids, more = prompt.token_ids[:SHOWN_IDS], len(prompt.token_ids) - SHOWN_IDS
        label = "no label" if prompt.label is None else f"label {str(prompt.label)[:200]!r}"
        yield f"  prompt {number}: {len(prompt.token_ids)} tokens, {label}"
        yield f"    text   {prompt.text!r}"
        yield f"    ids    {' '.join(map(str, ids))}{f' ... {more} more' if more > 0 else ''}"
        yield f"    tokens {' '.join(map(repr, tokenizer.convert_ids_to_tokens(list(ids))))}{' ...' if more > 0 else ''}"


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counter.most_common()) or "none"


def _verdicts(config: Config, registry: Registry, report: Report, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    from rlbatch.gold_answers import verdicts

    for name, prompts in report.gold.items():
        if name not in registry.rewards:
            continue
        options = config.reward.options if name == config.reward.name else {}
        yield f"  reward {name} of its own gold answers ({len(prompts)} rows):"
        reward, scope = registry.build_reward(name, options), reward_parts.scope_of(registry.rewards, name, options)
        yield from (f"    {line}" for line in verdicts(name, reward, scope, prompts, tokenizer, GOLD_S))


if __name__ == "__main__":
    end_with_reader()
    keep_output()
    sys.exit(exit_code_of_display(main(sys.argv[1:])))
