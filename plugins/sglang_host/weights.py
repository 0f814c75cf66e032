"""Loads weights into one of SGLang's scheduler processes, out of memory that the trainer shares, or a broadcast."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from rlbatch.collectives import gathered
from rlbatch.engines.transfer.checksums import Part, came
from rlbatch.engines.transfer.receiver import WeightReceiver
from rlbatch.engines.transfer.shared_memory import device_identity
from rlbatch.engines.transfer.weight_group import SENDER, WeightGroup

from .held_weights import HeldWeights
from .pairs import Pairs
from .workarounds import missing
from .write_audit import REFUSALS, WriteAudit


class NotReceivedError(Exception):
    """What others sent or receive together with this process did not arrive here."""


class WorkerWeights:
    """Answers the host's calls in one scheduler process, which has SGLang's ``ModelRunner``."""

    def __init__(self, runner: Any) -> None:
        self._model, self._tp_rank = runner.model, runner.tp_rank
        self._device = torch.device("cpu") if runner.device == "cpu" else torch.device(runner.device, torch.cuda.current_device())
        self._receiver = WeightReceiver(self._device)
        self._pairs = Pairs(self._model)
        self._is_joined = False
        self._audit: WriteAudit | None = None
        self._held, self._came, self._checks = HeldWeights(self._model), dict[str, Part](), False
        self._current = ""

    def identify(self) -> dict[str, Any]:
        """Shows that the plugin is there; this worker's ``device`` and the ``experts`` that it holds (see ``held_experts``). Raises
        RuntimeError if SGLang did not apply a hook; SGLang only logs that.
        """
        if lacking := missing():
            raise RuntimeError(f"rollout=sglang: {lacking[0]} is not there to hook into. Use a version that is supported.")
        return {"device": device_identity(self._device), "experts": held_experts(self._model)}

    def join(self, path: str, size: int, limit_s: float) -> dict[str, Any]:
        """Joins the group over which weights come from here on: the sender and, after it, all workers; see ``WeightGroup``."""
        self._receiver.join(WeightGroup(Path(path), SENDER + 1 + self._tp_rank, size, self._device, limit_s))
        self._is_joined = True
        return {}

    def start(self, audit: bool, check: bool) -> dict[str, Any]:
        """Begins an update; with ``check`` what the model holds will be asked."""
        self._pairs.start()
        self._checks, self._came = check, {}
        self._audit = WriteAudit(self._model) if audit else None
        return {}

    def load(self, devices: Mapping[str, Any]) -> dict[str, Any]:
        """Loads what a call brings; its memory is not read afterwards.

        Raises:
            ValueError: the model does not take a tensor.
            NotReceivedError: a broadcast failed here.
        """
        received = self._received(devices)
        if self._checks:
            known = () if self._audit is not None else self._held.names
            self._came |= {part[0]: part for part in came([(name, tensor) for name, tensor in received if name not in known])}
        complete = self._complete(received)
        try:
            if self._audit is None:
                self._model.load_weights(complete)
            else:
                with self._audit.counting():
                    self._model.load_weights(self._audit.watch(complete))
        except REFUSALS as error:
            if str(error).startswith("weight sync"):
                raise
            name = (self._audit.failed if self._audit is not None else "") or self._current
            raise ValueError(f"weight sync: the engine refuses {name} ({type(error).__name__}: {error}).") from error
        if self._device.type != "cpu":
            torch.cuda.synchronize(self._device)
        return {}

    def _received(self, devices: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
        """Opens what the ranks sent; see ``WeightReceiver.tensors``."""
        try:
            return self._receiver.tensors(devices)[1]
        except REFUSALS as error:
            if self._is_joined:  # the others wait for this one in the broadcast: what ends it ends the engine, and nobody waits
                raise NotReceivedError(f"{type(error).__name__}: {error}") from error
            raise

    def finish(self) -> dict[str, Any]:
        """Ends an update; returns the audit's report, if there was one. Raises ValueError if a tensor came without the one that it is
        loaded with.
        """
        self._receiver.finish()
        self._pairs.finish()
        report = self._audit.report() if self._audit is not None else {}
        if self._audit is not None:
            self._held = self._audit.held
        self._audit = None
        return report

    def held(self) -> list[Part]:
        """Checksums of what the model holds now of the last update's tensors; of those that cannot be told, as they came."""
        names = self._held.names
        return self._held.checksums() + [part for name, part in self._came.items() if name not in names]

    def _complete(self, tensors: list[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that the model can load by now, of these and of those that came before."""
        for name, tensor in self._pairs.whole(tensors):
            self._current = name
            yield name, tensor
            if self._audit is not None and self._pairs.is_half(name):
                self._audit.use(name)


def answer(runner: Any, text: str) -> tuple[bool, str]:
    """One call of the host, the same in every ``ModelRunner`` of the engine: JSON with ``operation``, a method of ``WorkerWeights``, and
    its arguments.

    Returns:
        Whether it succeeded everywhere, and the answers of all workers as JSON, or what is wrong.
    """
    call = json.loads(text)
    operation = call.pop("operation")
    weights: WorkerWeights = vars(runner).get("rlbatch_weights") or WorkerWeights(runner)
    runner.rlbatch_weights = weights
    try:
        own = {"answer": getattr(weights, operation)(**call)}
    except REFUSALS as error:
        own = {"error": str(error) or type(error).__name__}
    answers = _of_all(own, runner.tp_group)
    errors = [each["error"] for each in answers if "error" in each]
    return (False, errors[0]) if errors else (True, json.dumps([each["answer"] for each in answers]))


def _of_all(own: dict[str, Any], group: Any) -> list[dict[str, Any]]:
    """The answers of all workers."""
    return [own] if group.world_size == 1 else gathered(own, group.cpu_group)


def held_experts(model: Any) -> list[int] | None:
    """Numbers of the routed experts that a worker's model has in every layer, ascending; as SGLang's own loader finds them.

    Returns:
        None: there are none, or one list does not say it, because layers differ or SGLang moves experts between workers.
    """
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.server_args import get_global_server_args

    if get_global_server_args().enable_eplb:
        return None
    experts_map = get_global_expert_location_metadata()
    held: set[tuple[int, ...]] = set()
    for layer in model.modules():
        if isinstance(layer, FusedMoE):
            number = layer._num_global_routed if experts_map is None else experts_map.num_logical_experts
            held.add(tuple(expert for expert in range(number) if _is_here(layer, experts_map, expert)))
    return list(held.pop()) if len(held) == 1 else None


def _is_here(layer: Any, experts_map: Any, expert: int) -> bool:
    copies = [expert] if experts_map is None else experts_map.logical_to_all_physical(layer.layer_id, expert)
    return any(0 <= layer._map_global_expert_id_to_local_expert_id(copy) < layer._num_local_routed for copy in copies)
