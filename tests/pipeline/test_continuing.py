"""Responses in parts: what is asked for, and that what was there stays as it is."""

from __future__ import annotations

import random

import pytest
import torch

from rlbatch.api import Continued, KeptTokens, Prompt, Routes, Sample, SampleGroup, SamplingParams, Span, draw_key
from rlbatch.pipeline.continuing import joined, parts_of, unfinished
from rlbatch.pipeline.exchange import lags_of
from rlbatch.pipeline.waiting_groups import Candidate, pack_candidates, unpack_candidates

PROMPT = Prompt(1, "a", (7, 8))
PROMPTS = [Prompt(0, "b", (3,)), PROMPT]


def part_of(prompt: Prompt, tokens: list[int], version: int, reason: str = "length", index: int = 0, kept: bool = False) -> Sample:
    """As ``Rollout`` makes it of an engine's answer."""
    before = len(prompt.token_ids)
    return Sample(
        prompt=prompt,
        sample_index=index,
        token_ids=torch.tensor([*prompt.token_ids, *tokens]),
        loss_mask=torch.tensor([0.0] * before + [1.0] * len(tokens)),
        rollout_logprobs=torch.tensor([0.0] * before + [-0.1 * token - version for token in tokens]),
        response="",
        finish_reason=reason,  # type: ignore[arg-type]
        policy_version=version,
        kept=KeptTokens(torch.tensor(tokens, dtype=torch.int32), torch.tensor([0] * before + [1] * len(tokens))) if kept else None,
        routes=routes_of(before + len(tokens), version) if kept else None,
    )


def routes_of(tokens: int, version: int) -> Routes:
    """By a policy; the last token was not read, nor the first one by version 7."""
    known = torch.tensor([version != 7] + [True] * (tokens - 2) + [False])
    return Routes(torch.full((tokens, 2, 2), version, dtype=torch.uint8).masked_fill(~known[:, None, None], 0), known)


def in_parts(tokens: list[list[int]], versions: list[int], index: int = 0, kept: bool = False) -> Sample:
    """A response whose parts were sampled by these policies; the last one stops."""
    sample, candidate = None, Candidate(5, 1, SampleGroup(PROMPT, []))
    for place, (part, version) in enumerate(zip(tokens, versions, strict=True)):
        [asked] = parts_of(candidate, [index])
        reason = "stop" if place == len(tokens) - 1 else "length"
        sample = joined(PROMPT, sample, part_of(asked, part, version, reason, index, kept), f"text {place}")
        candidate = Candidate(5, 1, SampleGroup(PROMPT, [sample] * (index + 1)))
    assert sample is not None
    return sample


@pytest.mark.parametrize("kept", [False, True])
def test_a_part_joins_what_was_there(kept: bool) -> None:
    """Tokens, masks and log-probs of earlier parts stay, and each token knows who sampled it; parts of one policy are one span."""
    sample = in_parts([[5, 6], [9], [4, 1]], [3, 3, 7], kept=kept)
    assert sample.token_ids.tolist() == [7, 8, 5, 6, 9, 4, 1]
    assert sample.loss_mask.tolist() == [0, 0, 1, 1, 1, 1, 1]
    torch.testing.assert_close(sample.rollout_logprobs, torch.tensor([0, 0, -3.5, -3.6, -3.9, -7.4, -7.1]))
    assert sample.spans == (Span(3, 2, 5), Span(7, 5, 7))
    assert (sample.policy_version, sample.finish_reason, sample.response) == (7, "stop", "text 2")
    assert lags_of(sample, 8).tolist() == [0, 0, 5, 5, 5, 1, 1]
    assert lags_of(sample, -1).tolist() == [0] * 7
    if kept:
        assert sample.kept is not None
        assert (sample.kept.ids.tolist(), sample.kept.counts.tolist()) == ([5, 6, 9, 4, 1], [0, 0, 1, 1, 1, 1, 1])
        assert sample.routes is not None
        assert sample.routes.experts[:, 1, 1].tolist() == [3, 3, 3, 3, 7, 7, 0]
        assert sample.routes.known.tolist() == [True] * 6 + [False]


def test_parts_have_random_numbers_of_their_own() -> None:
    """The first is the whole response's; then each sample and part of every group has its own, also of one prompt that is drawn twice."""
    params, keys = SamplingParams(1.0, 8, (), 2, (0, 12)), []
    plain = [draw_key(params, PROMPT, index) for index in range(2)]
    for number in (5, 6):
        empty = Candidate(number, 1, SampleGroup(PROMPT, []))
        assert [draw_key(params, part, 0) for part in parts_of(empty, [0, 1])] == plain
        for length in (2, 4):
            group = SampleGroup(PROMPT, [part_of(PROMPT, [5] * length, 0, index=index) for index in range(2)])
            parts = parts_of(Candidate(number, 1, group), [0, 1])
            assert all(part.token_ids == (7, 8, *[5] * length) for part in parts)
            keys += [draw_key(params, part, 0) for part in parts]
    assert len({*keys, *plain}) == 10
    assert not isinstance(PROMPT, Continued)


def test_which_responses_go_on() -> None:
    """Those without an end that are shorter than the limit; all of a group that was not begun."""
    samples = [
        part_of(PROMPT, [5, 1], 0, "stop", 0),
        part_of(PROMPT, [5, 5], 0, "length", 1),
        part_of(PROMPT, [5] * 4, 0, "length", 2),
    ]
    assert unfinished(SampleGroup(PROMPT, samples), 3, 4) == [1]
    assert unfinished(SampleGroup(PROMPT, samples), 3, 2) == []
    assert unfinished(SampleGroup(PROMPT, []), 3, 4) == [0, 1, 2]


def test_a_part_without_routes() -> None:
    """What was known stays known."""
    first = joined(PROMPT, None, part_of(PROMPT, [5, 6], 3, kept=True), "")
    asked = parts_of(Candidate(5, 1, SampleGroup(PROMPT, [first])), [0])[0]
    both = joined(PROMPT, first, part_of(asked, [9], 4), "")
    assert both.routes is not None
    assert both.routes.known.tolist() == [True, True, True, False, False]
    assert both.routes.experts[:, 0, 0].tolist() == [3, 3, 3, 0, 0]


@pytest.mark.parametrize("kept", [False, True])
def test_waiting_groups_come_back_as_they_were(kept: bool) -> None:
    """From bytes, bitwise: finished groups and others, with spans, rewards and texts."""
    draw, candidates = random.Random(3), []
    for number in range(4):
        lengths = [[draw.randint(1, 3) for _ in range(2)] for _ in range(3)]
        samples = [
            in_parts([[draw.randint(0, 9) for _ in range(length)] for length in parts], [2, 2 + number], index, kept)
            for index, parts in enumerate(lengths)
        ]
        candidates.append(Candidate(number, 1, SampleGroup(PROMPT, samples, [0.1, 1 / 3, -7.0] if number % 2 else [])))
    content = pack_candidates(candidates)
    back = unpack_candidates(content, PROMPTS)
    assert pack_candidates(back) == content
    for before, after in zip(candidates, back, strict=True):
        assert (after.number, after.position, after.oldest_version, after.group.rewards) == (before.number, 1, 2, before.group.rewards)
        assert after.group.prompt is PROMPT
        for one, other in zip(before.group.samples, after.group.samples, strict=True):
            assert (one.spans, one.response, one.finish_reason) == (other.spans, other.response, other.finish_reason)
            for name in ("token_ids", "loss_mask", "rollout_logprobs"):
                assert torch.equal(getattr(one, name), getattr(other, name))
                assert getattr(one, name).dtype == getattr(other, name).dtype
            assert (one.kept is None) == (other.kept is None)
            if one.kept and other.kept:
                assert torch.equal(one.kept.ids, other.kept.ids)
                assert torch.equal(one.kept.counts, other.kept.counts)
            assert (one.routes is None) == (other.routes is None)
            if one.routes and other.routes:
                assert torch.equal(one.routes.experts, other.routes.experts)
                assert torch.equal(one.routes.known, other.routes.known)
    assert unpack_candidates(pack_candidates([]), PROMPTS) == []
