"""Records the values that pass between this rank's modules in a forward pass, joined over the ranks that share a pack."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from rlbatch.api import Microbatch
from rlbatch.megatron.microbatch_inputs import MicrobatchInputs


class PassingValues:
    """Hooks on a model that keep the first value at each place; later packs of the same pass are left out.

    A place is a layer, counted from 0, and a name of what passes there: ``embedding`` (layer -1), ``input_norm``, ``query``, ``key``,
    ``value``, ``context`` (before the output projection), ``attention``, ``mlp_norm``, ``router_logits``, ``router_weights`` (0 where not
    chosen), ``shared_experts``, ``mlp``, ``output`` (with the residual), ``final_norm`` and ``prediction`` (log-prob and entropy), both
    of the layer behind the last. What a layer spec fuses passes nowhere.

    Args:
        stages: Model chunks of this rank.
        num_layers: Number of layers of the whole model.
    """

    def __init__(self, stages: Sequence[Any], num_layers: int) -> None:
        self._behind = num_layers
        self._kept: dict[tuple[int, str], Tensor] = {}
        self._keeps = True
        self._tp = parallel_state.get_tensor_model_parallel_group()
        self._is_split = stages[0].config.sequence_parallel
        for stage in stages:
            self._watch_stage(stage)

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of those with the same values, which are the ranks of its stage."""
        return self._tp.rank() == 0 and parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0

    def whole(self, microbatch: Microbatch) -> Iterator[tuple[tuple[int, str], Tensor]]:
        """Yields the values at each place of this rank's stage, and ends the recording.

        A collective of the ranks that share the pack and the stage. A value is dropped once it was yielded.

        Args:
            microbatch: Pack of the forward pass.

        Yields:
            Place, and its values on the host, [T, ...] for the pack's tokens; ``prediction`` [T, 2] is about the token itself, as log-probs
            are.
        """
        pack = MicrobatchInputs.of(microbatch, torch.cuda.current_device(), parallel_state.get_context_parallel_group())
        self._keeps = False
        for place in list(self._kept):
            values = self._over_tensor_parallel(place[1], self._kept.pop(place))
            yield place, pack.restore(values) if place[1] == "prediction" else pack.whole(values)

    def _over_tensor_parallel(self, name: str, local: Tensor) -> Tensor:
        if self._tp.size() == 1 or name == "prediction":
            return local
        has_heads = name in ("query", "key", "value", "context")
        if not has_heads and not self._is_split:
            return local
        parts = [torch.empty_like(local) for _ in range(self._tp.size())]
        dist.all_gather(parts, local.contiguous(), group=self._tp)
        return torch.cat(parts, 1 if has_heads else 0)

    def _watch_stage(self, stage: Any) -> None:
        if stage.pre_process:
            self._watch(stage.embedding, -1, "embedding")
        for layer in stage.decoder.layers:
            self._watch_layer(layer, int(layer.layer_number) - 1)
        if stage.post_process:
            self._watch(stage.decoder.final_layernorm, self._behind, "final_norm")
            stage.register_forward_hook(lambda module, args, output: self._keep(self._behind, "prediction", output.T))

    def _watch_layer(self, layer: Any, number: int) -> None:
        attention, mlp = layer.self_attention, layer.mlp
        self._watch(layer.input_layernorm, number, "input_norm")
        attention.core_attention.register_forward_hook(lambda *call: self._keep_attention(number, *call), with_kwargs=True)
        self._watch(attention, number, "attention")
        self._watch(layer.pre_mlp_layernorm, number, "mlp_norm")
        if router := getattr(mlp, "router", None):
            self._watch_routing(router, number)
        if getattr(mlp, "shared_experts", None) is not None:
            self._watch(mlp.shared_experts, number, "shared_experts")
        self._watch(mlp, number, "mlp")
        self._watch(layer, number, "output")

    def _watch(self, module: Any, layer: int, name: str) -> None:
        if any(True for _ in module.parameters()) or name == "output":  # else it is in the place of one that is fused
            module.register_forward_hook(lambda module, args, output: self._keep(layer, name, _first(output)))

    def _watch_routing(self, router: Any, layer: int) -> None:
        routing = router.routing

        def watched(logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            weights, chosen = routing(logits, *args, **kwargs)
            self._keep(layer, "router_logits", logits.flatten(0, -2))
            self._keep(layer, "router_weights", weights.where(chosen, 0))
            return weights, chosen

        router.routing = watched

    def _keep_attention(self, layer: int, module: Any, args: Any, kwargs: Any, output: Tensor) -> None:
        for name, values in zip(("query", "key", "value"), args, strict=False):
            self._keep(layer, name, values)
        self._keep(layer, "context", _first(output))

    def _keep(self, layer: int, name: str, values: Tensor) -> None:
        if self._keeps and (layer, name) not in self._kept:
            rows = values.squeeze(1) if values.ndim == 3 and name not in ("query", "key", "value") else values
            self._kept[layer, name] = rows.detach().clone()


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output
