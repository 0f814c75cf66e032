"""The policy: one rank's share of the model on Megatron-core, without the parts that train it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from megatron.core.transformer.module import Float16Module

from rlbatch.api import ModelFamily
from rlbatch.config.schema import Config
from rlbatch.kernels import choice
from rlbatch.megatron import parallel
from rlbatch.megatron.dispatcher import gather_tokens
from rlbatch.megatron.finite import FiniteCheck
from rlbatch.megatron.model import build_model, transformer_config
from rlbatch.megatron.names import canonical_tensors
from rlbatch.megatron.router import check_routers
from rlbatch.megatron.te_spec import uses_transformer_engine
from rlbatch.plan.layout import dispatcher
from rlbatch.weights.params import NamedTensor, ParameterMap, ReadTensor


class Policy:
    """The weights of this rank. Every method is a collective over all ranks.

    Args:
        config: Config of the job; model-parallel groups must exist.
        family: Family of the model.

    Attributes:
        megatron_config: Megatron's config of every stage.
        stages: Model chunks of this rank.
        modules: The same chunks, in the type that they compute in.
        params: Global Megatron name -> parameter or buffer.
        policy_version: Number of optimizer updates so far.
    """

    def __init__(self, config: Config, family: ModelFamily) -> None:
        self._config = config
        choice.ask(config.train.kernels)
        transformer_engine = uses_transformer_engine(config.train)
        self.megatron_config = transformer_config(family, config.layout, config.train.precision, transformer_engine=transformer_engine)
        self.stages = build_model(self.megatron_config, family)
        for stage in self.stages:
            stage.temperature, stage.chunk_tokens = config.rollout.temperature, config.train.logprob_chunk_tokens
        check_routers(self.stages)
        gathers = dispatcher(config.layout, family) == "gather"
        self._dispatchers = gather_tokens(self.stages) if gathers else []
        self.params = canonical_tensors(self.stages)
        is_bf16 = self.megatron_config.bf16
        self.modules: list[Any] = [Float16Module(self.megatron_config, stage) if is_bf16 else stage for stage in self.stages]
        self._map = ParameterMap(family, parallel.weight_groups())
        self._finite = FiniteCheck(self.params, self._map.origin)
        self.policy_version = 0

    @property
    def weight_bytes(self) -> int:
        """Size of this rank's parameters and buffers, bytes."""
        return sum(tensor.nbytes for tensor in self.params.values())

    def load(self, read: ReadTensor, names: Iterable[str] | None = None, loaded: Callable[[int], None] = lambda nbytes: None) -> None:
        """Loads the policy from Hugging Face tensors.

        Args:
            read: Returns a tensor by name, or an object that is read when sliced.
            names: Names of all tensors in the checkpoint, to check; None: they are not checked.
            loaded: Called with the bytes of every parameter that was filled.
        """
        if names is not None:
            self._map.check_names(names)
        self._map.load(self.params, read, loaded)
        self.weights_changed()

    def weights_changed(self) -> None:
        """Updates copies of the weights, in classes that have some, after the weights were replaced."""

    def export(self, *, quantize: bool = False, wanted: Sequence[int] | None = None) -> Iterator[NamedTensor]:
        """Streams the policy as full Hugging Face tensors, on every rank; see ``ParameterMap.export``."""
        return self._map.export(self.params, quantize=quantize, wanted=wanted)

    def storages(self) -> frozenset[int]:
        """Addresses of the memory that holds the policy now."""
        return frozenset(tensor.untyped_storage().data_ptr() for tensor in self.params.values())

    def not_finite(self, *, with_optimizer: bool = False) -> str:
        """Text about the first weight (or value of the optimizer) that is infinite or NaN, the same on every rank; empty if none is."""
        return self._finite.broken(with_optimizer=with_optimizer)
