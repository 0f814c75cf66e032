"""Groups that wait for a later step: accepted ones that were not needed, and ones whose responses are unfinished.

Every rank knows of all such groups; each is held by the rank that sampled it, until another one trains on it or continues it. In a
checkpoint each rank that holds some writes a safetensors file, which any layout can read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from rlbatch.api import DataError, KeptTokens, Prompt, Routes, Sample, SampleGroup, Span
from rlbatch.collectives import gathered

FILE = "waiting_{rank:05d}.safetensors"
"""File name in a checkpoint's folder; until 2026-11-29 one ``waiting.safetensors`` had all groups."""
_HEADER = "groups"


@dataclass(frozen=True)
class Candidate:
    """A drawn prompt and its samples so far.

    Attributes:
        number: Place of the prompt in the order of all prompts that the run has drawn.
        position: Position of the prompt among all training prompts.
        group: Samples of the prompt, perhaps unfinished; none before the first round.
    """

    number: int
    position: int
    group: SampleGroup

    @property
    def oldest_version(self) -> int:
        """Policy version of the oldest token; -1 if not known."""
        return min((span.policy_version for sample in self.group.samples for span in spans_of(sample)), default=-1)

    @property
    def response_tokens(self) -> int:
        """Number of tokens sampled so far."""
        return sum(sample.response_length for sample in self.group.samples)


class Ticket(NamedTuple):
    """The facts that every rank knows of a waiting group; see ``Candidate``."""

    number: int
    position: int
    oldest_version: int


@dataclass
class Waiting:
    """The state that a step leaves to the next, equal on every rank except for ``held``.

    Attributes:
        drawn: Number of prompts that the run has drawn.
        accepted: Groups to train on, in order.
        unfinished: Groups to be continued, in order.
        held: Waiting groups that this rank holds, by number.
        generated: Number of tokens that the run has sampled.
        trained: Number of these tokens that an update used.
    """

    drawn: int = 0
    accepted: tuple[Ticket, ...] = ()
    unfinished: tuple[Ticket, ...] = ()
    held: Mapping[int, Candidate] = field(default_factory=dict)
    generated: int = 0
    trained: int = 0

    def copy(self) -> Waiting:
        """A copy of the present state."""
        return replace(self)

    def restore(self, earlier: Waiting) -> None:
        """Returns to an earlier state."""
        vars(self).update(vars(earlier))

    def counts(self) -> dict[str, int]:
        """Numbers that a checkpoint's progress.json records."""
        return {"drawn": self.drawn, "accepted": len(self.accepted), "generated": self.generated, "trained": self.trained}

    def to_bytes(self) -> bytes:
        """The groups that this rank holds, as a file; empty if it holds none."""
        return pack_candidates(list(self.held.values())) if self.held else b""


def restored(folder: Path, counts: Any, prompts: Sequence[Prompt]) -> Waiting:
    """Reads the waiting groups of a checkpoint; a collective, in which each file is read by one rank.

    Args:
        folder: Folder of the checkpoint.
        counts: ``Waiting.counts`` in its progress; None if its version had none.
        prompts: Training prompts of the run.

    Raises:
        DataError: a rank cannot read a file, or groups are missing; raised on every rank.
    """
    if counts is None:
        return Waiting()
    path, failure, held = folder, "", dict[int, Candidate]()
    try:
        number, drawn, generated, trained = (int(counts[name]) for name in ("accepted", "drawn", "generated", "trained"))
        for path in sorted(folder.glob("waiting*.safetensors")):
            if int(path.stem.partition("_")[2] or 0) % dist.get_world_size() == dist.get_rank():
                held |= {each.number: each for each in unpack_candidates(path.read_bytes(), prompts)}
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, IndexError, RuntimeError) as error:
        failure = f"{path}: cannot be read ({error!r}). Restore it, or name another checkpoint."
    if told := next(filter(None, gathered(failure)), ""):
        raise DataError(told)
    mine = [(bool(each.group.rewards), each.number, each.position, each.oldest_version) for each in held.values()]
    said = sorted(one for part in gathered(mine) for one in part)
    unfinished, accepted = (tuple(Ticket(*one) for is_scored, *one in said if is_scored == which) for which in (False, True))
    if len(accepted) != number:
        raise DataError(f"{folder}: {len(accepted)} of {number} groups that waited are there. Restore it, or name another checkpoint.")
    return Waiting(drawn, accepted, unfinished, held, generated, trained)


def spans_of(sample: Sample) -> tuple[Span, ...]:
    """The spans of a response's tokens, each with the policy version that sampled it, in order."""
    return sample.spans or (Span(sample.policy_version, len(sample.prompt.token_ids), len(sample.token_ids)),)


def pack_candidates(candidates: Sequence[Candidate]) -> bytes:
    """Packs groups into a safetensors file: tokens and log-probs of all responses, concatenated, and the rest as JSON in the header."""
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
    if routes := [sample.routes for sample in samples if sample.routes is not None]:
        tensors |= {name: torch.cat([getattr(each, name) for each in routes]) for name in ("experts", "known")}
        tensors["routed"] = torch.tensor([sample.routes is not None for sample in samples])
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
    """Unpacks the groups of ``pack_candidates``.

    Args:
        content: Content of the file.
        prompts: Training prompts of the run.
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
    if "routed" in tensors:
        samples = [sample for candidate in candidates for sample in candidate.group.samples]
        routed = [sample for sample, is_routed in zip(samples, tensors["routed"].tolist(), strict=True) if is_routed]
        both = (tensors[name].split([len(sample.token_ids) for sample in routed]) for name in ("experts", "known"))
        for sample, *routes in zip(routed, *both, strict=True):
            sample.routes = Routes(*routes)
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
