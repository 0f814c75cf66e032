"""Responses that are generated in parts (``sampling.partial_tokens``): what an engine is asked for, and how its answer is joined to what
was there, which stays as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlbatch.api import Continued, KeptTokens, Prompt, Routes, Sample, SampleGroup, Span
from rlbatch.pipeline.waiting_groups import Candidate, spans_of


def unfinished(group: SampleGroup, group_size: int, most: int) -> list[int]:
    """The responses that go on, by their sample index. A group that was begun with another size than ``algorithm.group_size`` keeps it."""
    if not group.samples:
        return list(range(group_size))
    return [sample.sample_index for sample in group.samples if sample.finish_reason != "stop" and sample.response_length < most]


def tokens_so_far(group: SampleGroup, indices: list[int]) -> int:
    """Of each response that goes on: all have had as many parts."""
    return max((group.samples[index].response_length for index in indices), default=0) if group.samples else 0


def parts_of(candidate: Candidate, indices: list[int]) -> list[Continued]:
    """What the engine is asked for, one response each. The first part has the random numbers that the response would have as a whole."""
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
    """A response with its next part. ``before`` is the response without it (None: it has none yet); ``part`` counts what was there as
    prompt; ``text`` is that of the whole.
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
    """Each token's of when it was first read: its log-prob, or that of the token behind it, is of these experts."""
    if before is None or before.routes is None:
        return part.routes
    old, more = before.routes, len(part.token_ids) - len(before.token_ids)
    experts, known = pad(old.experts, (0, 0, 0, 0, 0, more)), pad(old.known, (0, more))
    if part.routes is None:
        return Routes(experts, known)
    return Routes(experts.where(known[:, None, None], part.routes.experts), known | part.routes.known)
