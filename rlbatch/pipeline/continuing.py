"""Continues responses that are generated in parts (``sampling.partial_tokens``).

Makes the requests to an engine, and joins its answers to the earlier parts, which stay unchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlbatch.api import Continued, KeptTokens, Prompt, Routes, Sample, SampleGroup, Span
from rlbatch.pipeline.waiting_groups import Candidate, spans_of


def unfinished(group: SampleGroup, group_size: int, most: int) -> list[int]:
    """Indices of the samples of a group that are not finished; all of a group without samples. A begun group keeps its own group size."""
    if not group.samples:
        return list(range(group_size))
    return [sample.sample_index for sample in group.samples if sample.finish_reason != "stop" and sample.response_length < most]


def tokens_so_far(group: SampleGroup, indices: list[int]) -> int:
    """Number of tokens that each unfinished response has so far: all have had as many parts."""
    return max((group.samples[index].response_length for index in indices), default=0) if group.samples else 0


def parts_of(candidate: Candidate, indices: list[int]) -> list[Continued]:
    """Requests to the engine, one for each response. The first part has the random numbers that the response would have as a whole."""
    prompt, samples = candidate.group.prompt, candidate.group.samples
    start = tokens_so_far(candidate.group, indices)
    return [
        Continued(
            prompt.prompt_id,
            prompt.text,
            tuple(samples[index].token_ids.tolist()) if samples else prompt.token_ids,
            draw=(candidate.number, index, start) if start else (prompt.prompt_id, index),
        )
        for index in indices
    ]


def joined(prompt: Prompt, before: Sample | None, part: Sample, text: str) -> Sample:
    """Joins a response with its next part.

    ``before`` is the response so far (None if it has none yet). ``part`` has the tokens of ``before`` in its prompt. ``text`` is the text
    of the whole response.
    """
    start = len(prompt.token_ids) if before is None else len(before.token_ids)
    spans = [] if before is None else list(spans_of(before))
    begun = spans.pop().start if spans and spans[-1].policy_version == part.policy_version else start
    spans.append(Span(part.policy_version, begun, len(part.token_ids)))

    def with_before(name: str) -> Tensor:
        new: Tensor = getattr(part, name)
        return new if before is None else torch.cat([getattr(before, name), new[start:]])

    return Sample(
        prompt=prompt,
        sample_index=part.sample_index,
        token_ids=with_before("token_ids"),
        loss_mask=with_before("loss_mask"),
        rollout_logprobs=with_before("rollout_logprobs"),
        response=text,
        finish_reason=part.finish_reason,
        policy_version=part.policy_version,
        kept=_kept(before, part, start),
        spans=tuple(spans),
        routes=_routes(before, part),
    )


def _kept(before: Sample | None, part: Sample, start: int) -> KeptTokens | None:
    if before is None or before.kept is None or part.kept is None:
        return part.kept
    return KeptTokens(torch.cat([before.kept.ids, part.kept.ids]), torch.cat([before.kept.counts, part.kept.counts[start:]]))


def _routes(before: Sample | None, part: Sample) -> Routes | None:
    """Joins the routes of both, each token's from when it was first read: log-probs were computed with these experts."""
    if before is None or before.routes is None:
        return part.routes
    old, more = before.routes, len(part.token_ids) - len(before.token_ids)
    experts, known = pad(old.experts, (0, 0, 0, 0, 0, more)), pad(old.known, (0, more))
    if part.routes is None:
        return Routes(experts, known)
    return Routes(experts.where(known[:, None, None], part.routes.experts), known | part.routes.known)
