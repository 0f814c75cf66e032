"""Replays routing: routers take the experts that an engine, or an earlier pass, chose, with weights and gradients of their own scores.

A router asks ``router_replay`` for its experts (Megatron-core from 0.16 on). Megatron's own answers by counting: the next forward pass, the
next recomputation. Here what is to be replayed comes with the pack, among the arguments of each layer, which recomputation gives it again:
no order of passes can mix packs up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from rlbatch.api import ModelError, Routes
from rlbatch.collectives import gathered
from rlbatch.megatron import parallel
from rlbatch.megatron.microbatch_inputs import MicrobatchInputs


class PackRouting:
    """The part of this rank's routers in one pass of one pack: whether they choose or replay, and what is recorded.

    Args:
        layers: Indices of the layers whose routers take part.
        routes: [T, layers, K] experts for the tokens that the routers see; None: the routers choose, and their choice is recorded.
        device: Device of the routers.
        trains: Whether the pass has a backward pass.
        compares: Whether routers that replay are also asked for their own choice.

    Attributes:
        recorded: For each layer, [T, K] recorded experts in the dtype of ``Routes``.
        others: Place of a layer -> [T] bool, tokens that its router would send to other experts.
    """

    def __init__(self, layers: Sequence[int], routes: Routes | None, device: Any, *, trains: bool, compares: bool = False) -> None:
        self._layers, self._trains, self._compares = layers, trains, compares
        self.others: dict[int, Tensor] = {}
        self._is_whole = routes is not None and bool(routes.known.all())
        self._routes = routes and Routes(routes.experts.to(device), routes.known.to(device))
        self._asked = [0] * len(layers)
        self.recorded: list[Tensor | None] = [None] * len(layers)

    def choose(self, place: int, scores: Tensor, native: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Chooses the experts of a layer's tokens, in place of its router.

        Args:
            place: Index of the layer in ``layers``.
            scores: [T, experts] scores by which the router would choose.
            native: Returns the router's own choice.

        Returns:
            [T, K] scores of the chosen experts, with the gradient, and [T, K] int64 experts.
        """
        # With recomputation each layer runs twice: without a gradient, then with it.
        self._asked[place] += torch.is_grad_enabled() == self._trains
        if self._routes is None:
            values, chosen = native()
            self.recorded[place] = chosen.to(expert_dtype(scores.shape[1]))
            return values, chosen
        chosen = self._routes.experts[:, place].long()
        if chosen.shape[0] != scores.shape[0]:
            raise ModelError(f"routing replay: layer {self._layers[place]} has {scores.shape[0]} tokens, the pack {chosen.shape[0]}.")
        if not self._is_whole:
            chosen = chosen.where(self._routes.known.unsqueeze(1), native()[1])
        if self._compares and place not in self.others:
            with torch.no_grad():
                self.others[place] = (native()[1].sort(-1).values != chosen.sort(-1).values).any(-1)
        return scores.gather(1, chosen), chosen

    @property
    def known(self) -> Tensor:
        """[T] bool, whether the token's experts are replayed."""
        return torch.empty(0, dtype=torch.bool) if self._routes is None else self._routes.known

    def check(self) -> None:
        """Raises ModelError unless every router has asked exactly once."""
        for layer, times in zip(self._layers, self._asked, strict=True):
            if times != 1:
                raise ModelError(
                    f"algorithm.routing_replay: layer {layer} took its experts {times} times in one pass over a pack: must be once. "
                    "Its router does not ask router_replay, or is recomputed without its layer. Use algorithm.routing_replay=none."
                )


@dataclass
class RoutedPack(PackedSeqParams):  # type: ignore[misc]
    """Megatron's description of a pack for each layer, with the routing of the pack; None: routers choose, unrecorded."""

    routing: PackRouting | None = None


class _LayerReplay:
    """The ``router_replay`` object of one layer's router."""

    def __init__(self, place: int) -> None:
        self._place = place
        self._routing: PackRouting | None = None

    def enter(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notes the pack's routing before the layer runs or is recomputed."""
        self._routing = getattr(kwargs.get("packed_seq_params"), "routing", None)

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: Any = None, group_topk: Any = None, default_compute_topk: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Answers Megatron's call for the experts of tokens; see its ``RouterReplay``."""
        native = partial(default_compute_topk, scores, topk, num_groups=num_groups, group_topk=group_topk)
        return native() if self._routing is None else self._routing.choose(self._place, scores, native)


class RoutingReplay:
    """The routers of this rank, set up to ask for their experts. Building the object is a collective.

    Args:
        stages: Model chunks of this rank.
        device: Device of the chunks.

    Attributes:
        layers: Indices of this rank's layers with experts, ascending.
        stages: Indices of the layers with experts of each pipeline stage.

    Raises:
        ModelError: a router would not ask.
    """

    def __init__(self, stages: Sequence[Any], device: Any) -> None:
        self._device, self._group = device, parallel_state.get_tensor_model_parallel_group()
        self._dtype = expert_dtype(stages[0].config.num_moe_experts or 0)
        found = [layer for stage in stages for layer in stage.decoder.layers if isinstance(layer.mlp, MoELayer)]
        self.layers = [int(layer.layer_number) - 1 for layer in found]
        self.stages: list[list[int]] = gathered(self.layers, parallel.pp_group())
        asking = {layer.mlp.router for layer in found}
        for stage in stages:
            for name, module in stage.named_modules():
                if isinstance(module, TopKRouter) and (module not in asking or module.config.moe_router_fusion):
                    raise ModelError(
                        f"algorithm.routing_replay: {name} would choose by itself: it must be its layer's mlp.router, built with "
                        "moe_router_fusion=False. Correct the model family's plugin, or use algorithm.routing_replay=none."
                    )
        for place, layer in enumerate(found):
            layer.mlp.router.router_replay = replay = _LayerReplay(place)
            layer.register_forward_pre_hook(replay.enter, with_kwargs=True)

    def recording(self) -> PackRouting:
        """The routing for a pass that records, without a backward pass."""
        return PackRouting(self.layers, None, self._device, trains=False)

    def replaying(self, routes: Routes, *, trains: bool, compares: bool = False) -> PackRouting:
        """The routing for a pass that replays.

        Args:
            routes: Routes of the pack's tokens on this context-parallel rank.
            trains: Whether the pass has a backward pass.
            compares: Whether routers are also asked for their own choice.
        """
        size, rank = self._group.size(), self._group.rank()  # sequence parallelism: a part of the tokens on each
        rows = Routes(routes.experts.chunk(size)[rank], routes.known.chunk(size)[rank])
        return PackRouting(self.layers, rows, self._device, trains=trains, compares=compares)

    def first_others(self, routing: PackRouting | None) -> dict[int, float]:
        """Shares of tokens by the first layer whose router would have chosen other experts than those replayed; a collective of all ranks.

        Only tokens that were replayed count, of one pack on each rank. Layers without such tokens are left out.

        Args:
            routing: Routing of a pass with ``compares``; None if this rank had none.
        """
        none = 1 + max((layer for stage in self.stages for layer in stage), default=0)
        counts = torch.zeros(none + 1, dtype=torch.int64, device=self._device)
        if routing is not None:
            first = torch.full(routing.known.shape, none, device=self._device)
            for place in sorted(routing.others, reverse=True):
                first[routing.others[place]] = self.layers[place]
            dist.all_reduce(first, dist.ReduceOp.MIN, group=parallel.pp_group())
            counts += torch.bincount(first[routing.known], minlength=none + 1)
        dist.all_reduce(counts)
        total = max(int(counts.sum()), 1)
        return {layer: count / total for layer, count in enumerate(counts[:none].tolist()) if count}

    def recorded(self, routing: PackRouting, pack: MicrobatchInputs, tokens: int) -> Routes:
        """The routes that a pass recorded for the whole pack; a collective of the ranks that share the pack and have the same layers.

        Args:
            routing: Routing from ``recording``.
            pack: Inputs of the pass.
            tokens: Number of tokens of the pack, without those that were added to it.
        """
        known = torch.ones(tokens, dtype=torch.bool)
        chosen = [each for each in routing.recorded if each is not None]
        if not chosen:
            return Routes(torch.empty(tokens, 0, 1, dtype=self._dtype), known)
        rows = torch.stack(chosen, 1).view(torch.uint8)  # gloo and NCCL send no int16
        whole = rows
        if self._group.size() > 1:
            whole = rows.new_empty(len(rows) * self._group.size(), *rows.shape[1:])
            dist.all_gather_into_tensor(whole, rows, group=self._group)
        return Routes(pack.whole(whole).view(self._dtype)[:tokens], known)


def expert_dtype(num_experts: int) -> torch.dtype:
    """The smallest integer type that torch computes with and that can tell so many experts apart."""
    return torch.uint8 if num_experts <= 256 else torch.int16
