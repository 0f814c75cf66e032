"""Finds values that are infinite or NaN before they reach the optimizer, a checkpoint or an engine, and names them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlbatch.api import ModelError
from rlbatch.collectives import gathered

MAX_GRADIENT_NORM = torch.finfo(torch.float32).max ** 0.5
"""Largest usable gradient norm. Beyond it squares, which Adam and clipping compute in float32, are infinite, and nothing is trained."""

EXPERT_STACK_DIMS = 3
"""Dimensions of a stack of experts, [experts, rows, columns]; every other parameter has fewer."""


@dataclass(frozen=True)
class Token:
    """A token of this rank's packs with values that are not finite or, if all are finite, the one with the largest.

    Attributes:
        pack: Index of its pack.
        position: Position in the pack.
        values: Name -> value of the token, in the order in which they are computed from each other.
    """

    pack: int
    position: int
    values: Mapping[str, float]

    @property
    def broken(self) -> str:
        """Name of the first value that is not finite; empty if all are finite."""
        return next((name for name, value in self.values.items() if not math.isfinite(value)), "")

    @property
    def rank(self) -> tuple[float, ...]:
        """Key that orders tokens of all ranks: the smallest is most likely the cause."""
        return (0.0,) if self.broken else (1.0, -max(map(abs, self.values.values())))


def find_token(packs: Sequence[tuple[Mapping[str, Tensor], Tensor]]) -> Token | None:
    """The first token of the packs with a value that is not finite, or else the one with the largest; None if there are no tokens.

    Args:
        packs: For each pack, its values ([T] each, by name) and their positions in the pack, [T].
    """
    largest: Token | None = None
    for number, (values, positions) in enumerate(packs):
        stacked, places = torch.stack([value.double().cpu() for value in values.values()]), positions.cpu()
        if not stacked.numel():
            continue
        broken = (~stacked.isfinite()).any(0)
        at = int(places.where(broken, places.max() + 1).argmin()) if broken.any() else int(stacked.abs().amax(0).argmax())
        token = Token(number, int(places[at]), dict(zip(values, stacked[:, at].tolist(), strict=True)))
        if token.broken:
            return token
        largest = token if largest is None or token.rank < largest.rank else largest
    return largest


class NotFinite(ModelError):
    """An update whose loss or gradients are not finite; raised on every rank, before anything was changed.

    Attributes:
        found: Text that names the values and the parameter; the same on every rank.
        token: Token of this rank that may be the cause; None if the rank computes no losses.
    """

    def __init__(self, found: str, token: Token | None) -> None:
        super().__init__(f"{found}. Lower optimizer.lr, or scale the rewards.")
        self.found, self.token = found, token


def any_rank(is_so: bool) -> bool:
    """Whether ``is_so`` is true on any rank; a collective."""
    flag = torch.tensor([is_so], dtype=torch.int32, device=_device())
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)


def norm_of_all(shards: Iterable[Tensor]) -> float:
    """Norm over all ranks' gradients, NaN or infinite if any value is; a collective. Values that several ranks hold count several times.

    Args:
        shards: Reduced gradients of this rank.
    """
    norms = [torch.linalg.vector_norm(shard).double() for shard in shards]
    square = torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64, device=_device())
    dist.all_reduce(square)
    return float(square.sqrt())


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all values of all tensors are finite, found in one pass without further memory."""
    extremes = [torch.stack(tensor.detach().aminmax()).float() for tensor in tensors if tensor.numel() and tensor.is_floating_point()]
    return not extremes or bool(torch.stack([values.to(extremes[0].device) for values in extremes]).isfinite().all())


class FiniteCheck:
    """Searches the tensors of a rank for values that are infinite or NaN. Every method is a collective.

    Args:
        params: Global Megatron name -> parameter or buffer.
        origin: Returns layer and Hugging Face name for such a name and, in a stack of experts, the index of the expert.
        optimizer: Optimizer of the parameters; None if they have none.
    """

    def __init__(self, params: Mapping[str, Tensor], origin: Callable[[str, int], tuple[int | None, str]], optimizer: Any = None) -> None:
        self._params, self._origin, self._optimizer = params, origin, optimizer

    def broken(self, *, with_optimizer: bool) -> str:
        """Text about the first weight or value of the optimizer that is not finite, the same on every rank; empty if all are finite."""
        held = [(name, "weights", tensor, 0) for name, tensor in self._params.items()]
        if with_optimizer:
            held += self._state()
        if not any_rank(not all_finite(tensor for _, _, tensor, _ in held)):
            return ""
        mine = next((self._words(*one) for one in held if not all_finite([one[2]])), "")
        return next(found for found in gathered(mine) if found)

    def first_gradient(self) -> str:
        """Text about the first parameter of the backward pass with a gradient that is not finite or, if all are, with the largest."""
        found: list[tuple[tuple[float, ...], str]] = [((-1.0,), "")]
        for order, (name, param) in enumerate(self._params.items()):
            gradient = getattr(param, "main_grad", None)
            if gradient is None:
                continue
            layer, origin = self._origin(name, 0)
            if all_finite([gradient]):
                largest = float(gradient.abs().max())
                found.append(((0.0, largest), f"{origin}, with gradients of up to {largest:.3g}"))
            else:
                depth = layer if layer is not None else -1 if name.startswith("embedding.") else math.inf
                found.append(((1.0, depth, order), self._words(name, "gradients", gradient)))
        return str(max(gathered(max(found)))[1])

    def _state(self) -> list[tuple[str, str, Tensor, int]]:
        """Main weights and moments of this rank: name of the parameter, kind of value, tensor, and first element in the parameter."""
        names = {id(param): name for name, param in self._params.items()}
        held = []
        for optimizer in self._optimizer.chained_optimizers:
            for param, (group, position) in getattr(optimizer, "model_param_group_index_map", {}).items():
                main = optimizer.optimizer.param_groups[group]["params"][position]
                start = optimizer._get_model_param_range_map(param)["param"].start
                values = {"main weights": main, **optimizer.optimizer.state.get(main, {})}
                held += [(names[id(param)], what, value, start) for what, value in values.items() if isinstance(value, Tensor)]
        return held

    def _words(self, name: str, what: str, tensor: Tensor, start: int = 0) -> str:
        """Text such as ``lm_head.weight (rank 3), 2 of 64 weights``; for a stack of experts it names the first broken expert."""
        broken, whole = ~tensor.detach().isfinite(), self._params[name]
        at = start + int(broken.flatten().int().argmax())
        layer, origin = self._origin(name, at // whole[0].numel() if whole.dim() == EXPERT_STACK_DIMS else 0)
        place = f"rank {dist.get_rank()}" if layer is None else f"layer {layer}, rank {dist.get_rank()}"
        return f"{origin} ({place}), {int(broken.sum())} of {broken.numel()} {what}"


def _device() -> Any:
    return torch.cuda.current_device()
