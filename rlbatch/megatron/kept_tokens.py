"""Log-probs over the part of the vocabulary that an engine chose each token from (top-p, top-k), so that the trainer uses the same.

Without that the ratio of the two would be wrong by the probability of what was left out: DeepSeek-V3.2 (arXiv 2512.02556), section 3.1,
"keep sampling mask".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlbatch.api import KeptTokens


def at_positions(kept: KeptTokens, positions: Tensor) -> KeptTokens:
    """The kept tokens at some positions, in their order.

    Args:
        kept: Kept tokens of [T] positions.
        positions: [P] int64 positions.
    """
    counts, starts = kept.counts.cpu()[positions], (kept.counts.cumsum(0) - kept.counts).cpu()[positions]
    # Places in ``ids``: from each position's start on, as many as it has.
    places = torch.arange(int(counts.sum())) + (starts - (counts.cumsum(0) - counts)).repeat_interleave(counts)
    return KeptTokens(kept.ids.cpu()[places], counts)


@dataclass(frozen=True)
class KeptColumns:
    """Kept tokens as columns of a tensor-parallel rank's logits.

    Attributes:
        ids: [K] int64 token ids, on the device.
        counts: [T] int64 number of kept tokens at each position, on the device; 0: the whole vocabulary.
        bounds: T + 1 indices in ``ids`` at which each position begins, and the end.
        first: Id of this rank's first column.
    """

    ids: Tensor
    counts: Tensor
    bounds: list[int]
    first: int

    @classmethod
    def of(cls, kept: KeptTokens, first: int, device: torch.device) -> KeptColumns:
        """Moves kept tokens to the device; no later use has to wait for it."""
        bounds = pad(kept.counts.cumsum(0), (1, 0)).tolist()
        return cls(kept.ids.to(device=device, dtype=torch.int64), kept.counts.to(device), bounds, first)

    def left_out(self, start: int, shape: torch.Size) -> Tensor:
        """[C, V / TP] bool, whether a column was not kept.

        Args:
            start: First position of the chunk, among the T positions.
            shape: Shape of the chunk's logits.
        """
        size, columns = shape
        begin, end = self.bounds[start], self.bounds[start + size]
        counts, local = self.counts[start : start + size], self.ids[begin:end] - self.first
        rows = torch.arange(size, device=counts.device).repeat_interleave(counts, output_size=end - begin)
        # Other ranks' tokens go into a column more. Without a mask of places: that would wait for the device.
        local = torch.where((local >= 0) & (local < columns), local, columns)
        left_out = (counts > 0).unsqueeze(-1).repeat(1, columns + 1)
        left_out[rows, local] = False
        return left_out[:, :columns]
