"""Prepares a microbatch for the model: aligned with predictions, on the device, with this context-parallel rank's part.

``Microbatch`` follows the convention that position t holds what concerns ``token_ids[t]``. The model predicts token t + 1 at position
t, so every per-token tensor is rolled by one, before context parallelism slices it. The first token of each sequence is masked, so
nothing leaks from one sequence into the one before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from rlbatch.api import Microbatch, Routes
from rlbatch.megatron.attention import zigzag_indices
from rlbatch.megatron.kept_tokens import at_positions

PER_TOKEN = (
    "loss_mask",
    "advantages",
    "rollout_logprobs",
    "sequence_ids",
    "old_logprobs",
    "ref_logprobs",
    "lags",
)
"""Fields of a ``Microbatch`` that have a value for each token, and are shifted with the predictions."""


def padded_to(microbatch: Microbatch, tokens: int) -> Microbatch:
    """The microbatch, extended to ``tokens`` tokens by one more, fully masked sequence where it is shorter."""
    missing = tokens - len(microbatch.token_ids)
    if missing == 0:
        return microbatch
    flat = ("token_ids", *PER_TOKEN)
    values = {name: getattr(microbatch, name) for name in flat}
    padded = {name: None if value is None else pad(value, (0, missing)) for name, value in values.items()}
    padded["sequence_ids"] = pad(microbatch.sequence_ids, (0, missing), value=len(microbatch.truncated))
    kept, routes = microbatch.kept, microbatch.routes
    return replace(
        microbatch,
        kept=kept and replace(kept, counts=pad(kept.counts, (0, missing))),
        routes=routes and Routes(pad(routes.experts, (0, 0, 0, 0, 0, missing)), pad(routes.known, (0, missing))),
        cu_seqlens=pad(microbatch.cu_seqlens, (0, 1), value=tokens),
        sampled_tokens=pad(microbatch.sampled_tokens, (0, 1)),
        truncated=pad(microbatch.truncated, (0, 1)),
        **padded,
    )


@dataclass(frozen=True)
class MicrobatchInputs:
    """The inputs of model and loss for a context-parallel rank's T_local = T / cp_size tokens.

    Attributes:
        token_ids: [T_local] input tokens.
        position_ids: [T_local] position of each token in its sequence.
        targets: [T_local] next token of each.
        cu_seqlens: [N+1] int32 bounds of sequences in the whole pack.
        longest: Number of tokens of the longest sequence.
        microbatch: Inputs of the loss, [T_local], aligned with ``targets``, except routes, which are aligned with ``token_ids``.
        select: [T_local] index of each token in the whole pack.
        cp_group: Process group of the ranks that share the pack.
    """

    token_ids: Tensor
    position_ids: Tensor
    targets: Tensor
    cu_seqlens: Tensor
    longest: int
    microbatch: Microbatch
    select: Tensor
    cp_group: Any

    @classmethod
    def of(cls, microbatch: Microbatch, device: Any, cp_group: Any) -> MicrobatchInputs:
        """Shifts a pack by one token, takes this rank's part, and moves it to the device.

        Args:
            microbatch: Whole pack; sequence lengths are multiples of 2 x cp_size if cp_size > 1.
            device: Device of the model.
            cp_group: Context-parallel process group.
        """
        bounds = microbatch.cu_seqlens.tolist()
        lengths = [end - start for start, end in pairwise(bounds)]
        size, rank = cp_group.size(), cp_group.rank()
        select = zigzag_indices(bounds, size, rank) if size > 1 else torch.arange(bounds[-1])
        positions = torch.cat([torch.arange(length) for length in lengths])

        def local(values: Tensor) -> Tensor:
            return values.cpu()[select].to(device)

        def shifted(values: Tensor | None) -> Tensor | None:
            return None if values is None else local(values.roll(-1, 0))

        kept = microbatch.kept
        return cls(
            token_ids=local(microbatch.token_ids),
            position_ids=local(positions),
            targets=local(microbatch.token_ids.roll(-1, 0)),
            cu_seqlens=microbatch.cu_seqlens.to(device=device, dtype=torch.int32),
            longest=max(lengths),
            microbatch=replace(
                microbatch,
                sampled_tokens=microbatch.sampled_tokens.to(device),
                truncated=microbatch.truncated.to(device),
                kept=kept and at_positions(kept, (select + 1) % bounds[-1]),
                routes=microbatch.routes and microbatch.routes.at(select),
                **{name: shifted(getattr(microbatch, name)) for name in PER_TOKEN},
            ),
            select=select,
            cp_group=cp_group,
        )

    @property
    def local_tokens(self) -> int:
        """Number of tokens of this rank, T_local."""
        return len(self.token_ids)

    @property
    def target_positions(self) -> Tensor:
        """[T_local] index of each of ``targets`` in the whole pack."""
        return (self.select + 1) % int(self.cu_seqlens[-1])

    def over_ranks(self, values: Tensor) -> Tensor:
        """Sums ``values`` over the ranks that share the pack; a collective over CP, in the backward pass too."""
        return values if self.cp_group.size() == 1 else _SumOverRanks.apply(values, self.cp_group)  # type: ignore[no-any-return]

    def restore(self, values: Tensor) -> Tensor:
        """Turns [T_local] values aligned with ``targets`` into [T] aligned with the pack's tokens, on the host; a collective over CP."""
        return self.whole(values).roll(1, 0)

    def whole(self, values: Tensor) -> Tensor:
        """Turns [T_local, ...] values aligned with ``token_ids`` into [T, ...] of the whole pack, on the host; a collective over CP."""
        size = self.cp_group.size()
        if size == 1:
            return values.detach().cpu()
        parts = values.new_empty(len(values) * size, *values.shape[1:])
        dist.all_gather_into_tensor(parts, values.detach().contiguous(), group=self.cp_group)
        bounds = self.cu_seqlens.tolist()
        order = torch.cat([zigzag_indices(bounds, size, rank) for rank in range(size)])
        return parts.cpu()[order.argsort()]


class _SumOverRanks(torch.autograd.Function):
    """All-reduce in both directions: each rank's sum is part of every rank's loss, and the losses of all ranks are added up."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
