"""An engine as a side: sequences that it samples, its log-probs of them, and its experts if it returns them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlbatch.align.values.places import Batch, Place, Trace
from rlbatch.api import ModelFamily, Prompt, RolloutContext, RolloutError, SamplingParams
from rlbatch.checkpoint.hf import HfTensors
from rlbatch.registry import Registry
from rlbatch.weights.export import buckets

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
ROUTES = "algorithm.routing_replay=rollout:"
"""Beginning of the error message of an engine that cannot return the experts of its tokens."""
BUCKET_MIB = 512
"""Size of a bucket of weights that is sent at once, MiB."""


@dataclass
class EngineSide:
    """A rollout backend's engine with the folder's weights, which are sent as in a run and then compared with those that it holds.

    Attributes:
        name: Name of the rollout backend, as in ``rollout=<name>``.
        folder: Folder of the model.
        family: Family of the model.
        registry: Registry with the backend.
        engine: Options of the engine, as in ``rollout.engine``.
        precision: ``fp32`` or ``bf16``.
        seed: Seed of its samples.
        scratch: Folder for its files.
    """

    name: str
    folder: Path
    family: ModelFamily
    registry: Registry
    engine: Mapping[str, Any]
    precision: str
    seed: int
    scratch: Path

    def __post_init__(self) -> None:
        self.title = f"{self.name} {self.precision}"

    def sample(self, tokens: Sequence[Sequence[int]]) -> Batch:
        """Samples sequences with the lengths and first tokens of these, and asks for experts unless the engine refuses.

        Raises:
            RolloutError: the engine does not start, or does not hold the weights that it was sent.
        """
        if self.family.num_experts and self.registry.rollouts[self.name].value.returns_routes:
            try:
                return self._sampled(tokens, has_routes=True)
            except RolloutError as error:
                if not str(error).startswith(ROUTES):
                    raise
        return self._sampled(tokens, has_routes=False)

    def _sampled(self, tokens: Sequence[Sequence[int]], *, has_routes: bool) -> Batch:
        self._logprobs: list[Tensor] = []
        self._routes: list[Tensor | None] = []
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
        context = RolloutContext(
            self.folder,
            device,
            DTYPES[self.precision],
            engine=self.engine,
            folder=self.scratch / self.name,
            audit_sync="always",
            with_routes=has_routes,
        )
        sequences = []
        with ExitStack() as started:
            backend = self.registry.build_rollout(self.name, {}, context)
            started.callback(backend.close)
            source = HfTensors(self.folder)
            backend.update_weights(buckets(((name, source.read(name).to(device)) for name in source.names()), BUCKET_MIB, 0))
            for number, given in enumerate(tokens):
                params = SamplingParams(1.0, max(len(given) - 1, 1), (), 1, (self.seed, number), with_routes=has_routes)
                [[completion]] = backend.generate([Prompt(number, "", (given[0],))], params)
                sequences.append(torch.tensor([given[0], *completion.token_ids]))
                self._logprobs.append(torch.tensor([0.0, *completion.logprobs]))
                self._routes.append(completion.routes)
        return Batch(sequences)

    def shown(self, want: Trace) -> Trace:
        """The values that the engine returned. It names experts without weights; where they are the baseline's, so are the weights."""
        values: dict[Place, Tensor] = {(self.family.num_layers, "logprobs"): torch.cat(self._logprobs)}
        for layer, name in want.values:
            if name == "router_weights" and all(routes is not None for routes in self._routes):
                values[layer, name] = self._weights(layer, want.values[layer, name])
        return Trace(values)

    def _weights(self, layer: int, weights: Tensor) -> Tensor:
        found, start = weights.clone(), 0
        for sequence, routes in zip(self._logprobs, self._routes, strict=True):
            assert routes is not None
            chosen = routes[:, self._place(layer, routes.shape[1])].long()
            rows = found[start : start + len(chosen)]
            theirs = torch.zeros_like(rows, dtype=torch.bool).scatter(1, chosen, True)
            other = (theirs != (rows != 0)).any(1)
            rows[other] = (theirs[other].to(rows.dtype) / chosen.shape[1]) * rows[other].sum(1, keepdim=True)
            start += len(sequence)
        return found

    def _place(self, layer: int, layers: int) -> int:
        """Index of a layer among those whose experts the engine returns: all layers, or those with experts."""
        if layers == self.family.num_layers:
            return layer
        return layer - (self.family.num_layers - layers)
