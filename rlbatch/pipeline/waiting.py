"""Groups that wait for a later step: accepted ones that were not needed, and ones whose responses are not finished.

Every rank has all of them, so that any engine may continue any, under any layout. They are one safetensors file in a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from rlbatch.api import DataError, KeptTokens, Prompt, Sample, SampleGroup, Span

FILE = "waiting.safetensors"
"""In a checkpoint's folder."""
_HEADER = "groups"


@dataclass(frozen=True)
class Candidate:
    """A prompt that was drawn, and what it has by now.

    Attributes:
        number: Its place in the order of all prompts that the run has drawn.
        position: The prompt's among all training prompts.
        group: Its samples, perhaps unfinished; none before it was sampled.
    """

    number: int
    position: int
    group: SampleGroup

    @property
    def oldest_version(self) -> int:
        """Policy version of its oldest token; -1: not known."""
        return min((span.policy_version for sample in self.group.samples for span in spans_of(sample)), default=-1)

    @property
    def response_tokens(self) -> int:
        """Sampled so far."""
        return sum(sample.response_length for sample in self.group.samples)


@dataclass
class Waiting:
    """What a step leaves to the next; alike on every rank.

    Attributes:
        drawn: Prompts that the run has drawn.
        accepted: Groups to train on, in order.
        unfinished: Groups to be continued, in order.
        generated: Tokens that the run has sampled.
        trained: Those of them that an update used.
    """

    drawn: int = 0
    accepted: tuple[Candidate, ...] = ()
    unfinished: tuple[Candidate, ...] = ()
    generated: int = 0
    trained: int = 0

    def copy(self) -> Waiting:
        """As it is now."""
        return replace(self)

    def restore(self, earlier: Waiting) -> None:
        """Becomes what it was."""
        vars(self).update(vars(earlier))

    def counts(self) -> dict[str, int]:
        """What a checkpoint's progress has of it."""
        return {"drawn": self.drawn, "accepted": len(self.accepted), "generated": self.generated, "trained": self.trained}

    def to_bytes(self) -> bytes:
        """Its groups."""
        return pack_candidates([*self.accepted, *self.unfinished])


def restored(folder: Path, counts: Any, prompts: Sequence[Prompt]) -> Waiting:
    """What a checkpoint has.

    Args:
        folder: The checkpoint.
        counts: ``Waiting.counts`` of its progress; None: it is of a version that had none.
        prompts: Of the run.

    Raises:
        DataError: it cannot be read.
    """
    if counts is None:
        return Waiting()
    try:
        path, number = folder / FILE, int(counts["accepted"])
        found = unpack_candidates(path.read_bytes(), prompts) if path.exists() else []
        drawn, generated, trained = (int(counts[name]) for name in ("drawn", "generated", "trained"))
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, IndexError, RuntimeError) as error:
        raise DataError(f"{folder / FILE}: cannot be read ({error!r}). Restore it, or name another checkpoint.") from error
    return Waiting(drawn, tuple(found[:number]), tuple(found[number:]), generated, trained)


def spans_of(sample: Sample) -> tuple[Span, ...]:
    """Who sampled which tokens, from the response's first to its last."""
    return sample.spans or (Span(sample.policy_version, len(sample.prompt.token_ids), len(sample.token_ids)),)


def pack_candidates(candidates: Sequence[Candidate]) -> bytes:
    """A safetensors file: tokens and log-probs of all responses, concatenated, and the rest as JSON in its header."""
    samples = [sample for candidate in candidates for sample in candidate.group.samples]

    def responses(name: str, dtype: torch.dtype) -> Tensor:
        parts = [getattr(sample, name)[len(sample.prompt.token_ids) :].to(dtype) for sample in samples]
        return torch.cat([torch.empty(0, dtype=dtype), *parts])

    tensors = {
        "token_ids": responses("token_ids", torch.int32),
        "loss_mask": responses("loss_mask", torch.float32),
        "rollout_logprobs": responses("rollout_logprobs", torch.float32),
    }
    if samples and all(sample.kept for sample in samples):
        kept = [sample.kept for sample in samples if sample.kept]
        tensors |= {"kept_counts": torch.cat([each.counts for each in kept]), "kept_ids": torch.cat([each.ids for each in kept])}
    said = [
        {
            "place": [candidate.number, candidate.position],
            "rewards": [candidate.group.rewards, candidate.group.parts, candidate.group.failures],
            "samples": [
                [sample.sample_index, sample.response_length, sample.response, sample.finish_reason, sample.policy_version, sample.spans]
                for sample in candidate.group.samples
            ],
        }
        for candidate in candidates
    ]
    return save(tensors, {_HEADER: json.dumps(said)})


def unpack_candidates(content: bytes, prompts: Sequence[Prompt]) -> list[Candidate]:
    """What ``pack_candidates`` was given.

    Args:
        content: Of the file.
        prompts: Of the run.
    """
    header: Mapping[str, Any] = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    said = json.loads(header["__metadata__"][_HEADER])
    lengths = [length for group in said for _, length, *_ in group["samples"]]
    tensors = load(content)
    parts = zip(*(tensors[name].split(lengths) for name in ("token_ids", "loss_mask", "rollout_logprobs")), strict=True)
    candidates = _candidates(said, prompts, parts)
    if "kept_counts" in tensors:
        samples = [sample for candidate in candidates for sample in candidate.group.samples]
        counts = tensors["kept_counts"].split([len(sample.token_ids) for sample in samples])
        ids = tensors["kept_ids"].split([int(each.sum()) for each in counts])
        for sample, *kept in zip(samples, ids, counts, strict=True):
            sample.kept = KeptTokens(*kept)
    return candidates


def _candidates(said: Sequence[Any], prompts: Sequence[Prompt], parts: Iterator[tuple[Tensor, ...]]) -> list[Candidate]:
    return [
        Candidate(
            group["place"][0],
            group["place"][1],
            SampleGroup(
                prompt := prompts[group["place"][1]],
                [_sample(prompt, entry, *next(parts)) for entry in group["samples"]],
                *group["rewards"],
            ),
        )
        for group in said
    ]


def _sample(prompt: Prompt, said: Sequence[Any], token_ids: Tensor, loss_mask: Tensor, logprobs: Tensor) -> Sample:
    index, _, response, finish_reason, version, spans = said
    zeros = torch.zeros(len(prompt.token_ids))
    return Sample(
        prompt=prompt,
        sample_index=index,
        token_ids=torch.cat([torch.tensor(prompt.token_ids, dtype=torch.int64), token_ids.long()]),
        loss_mask=torch.cat([zeros, loss_mask]),
        rollout_logprobs=torch.cat([zeros, logprobs]),
        response=response,
        finish_reason=finish_reason,
        policy_version=version,
        spans=tuple(Span(*span) for span in spans),
    )
