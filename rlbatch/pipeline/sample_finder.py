"""Finds the sample that caused a value that is not finite."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlbatch.api import Microbatch
from rlbatch.collectives import gathered
from rlbatch.megatron.finite import Token, any_rank, find_token
from rlbatch.pipeline.exchange import Batch
from rlbatch.pipeline.updates import Update

OF_THE_LOSS = ("loss", "derivative of the loss", "clipped")
"""Values that a policy loss computes, from finite inputs."""


@dataclass(frozen=True)
class SampleFinder:
    """Finds the sample of a step that a value comes from.

    Attributes:
        batch: All samples of the step.
        name: Returns the name of a sample, given its index.
    """

    batch: Batch
    name: Callable[[int], str]

    def first(self, update: Update, token: Token | None) -> str:
        """Text about the sample that is most likely the cause, from every rank's find in packs of ``update`` (None: none); a collective."""
        answers = [answer for answer in gathered(None if token is None else self._words(update, token)) if answer]
        return str(min(answers)[-1]) if answers else "no sample computes it"

    def broken_logprobs(self, updates: Sequence[Update]) -> str:
        """Text about the first sample with a log-prob that is not finite; empty if there is none. A collective."""
        found = None
        for update in updates:
            token = find_token([_logprobs(pack.microbatch) for pack in update.packs])
            if token is not None and token.broken:
                found = self._words(update, token)
                break
        if not any_rank(found is not None):
            return ""
        return str(min(answer for answer in gathered(found) if answer)[-1])

    def _words(self, update: Update, token: Token) -> tuple[Any, ...] | None:
        """A tuple that orders finds of different ranks, with the text as its last item; None for a dummy."""
        place = update.sample_at(token.pack, token.position)
        if place is None:
            return None
        sample, position = place
        told = [f"{name} {value:.6g}" for name, value in token.values.items()]
        last = list(token.values).index(token.broken) if token.broken else len(told)
        if not token.broken:
            gave = "the largest, all losses are finite"
        else:
            gave = f"{'algorithm.loss' if token.broken in OF_THE_LOSS else 'a forward pass'} gave the last"
        who = f"{self.name(sample)} (reward {float(self.batch.rewards[sample]):.6g}) has at token {position}"
        return (*token.rank, sample, position, f"{who} {', '.join(told[: last + 1])}: {gave}")


def _logprobs(microbatch: Microbatch) -> tuple[Mapping[str, Tensor], Tensor]:
    named = {
        "rollout log-prob": microbatch.rollout_logprobs,
        "log-prob": microbatch.old_logprobs,
        "reference log-prob": microbatch.ref_logprobs,
    }
    return {name: values for name, values in named.items() if values is not None}, torch.arange(len(microbatch.token_ids))
