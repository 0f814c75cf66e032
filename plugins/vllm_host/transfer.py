"""Weights out of memory that the trainer shares, into vLLM's workers; registered with vLLM under the name ``rlbatch``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rlbatch.engines.mapping import device_identity, open_handle
from rlbatch.engines.packing import Place, views

from .audit import WriteAudit
from .experts import held_experts
from .versions import loading_parts


@dataclass
class NoInit(WeightTransferInitInfo):  # type: ignore[misc]
    """There is nothing to agree on beforehand."""


@dataclass
class Bucket(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One bucket.

    Attributes:
        serial: Of the memory: what is open already is not opened again.
        handles: Device -> what opens its memory.
        places: Where the tensors lie in it.
        audit: Whether every write is counted.
    """

    serial: int
    handles: dict[str, Any]
    places: list[Place]
    audit: bool = field(default=False)


class SharedMemoryTransfer(WeightTransferEngine):  # type: ignore[misc]
    """A worker's end. vLLM collects the tensors of a layer and writes them into the parameters that it has: CUDA graphs stay valid."""

    init_info_cls = NoInit
    update_info_cls = Bucket

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Called by vLLM, with the model."""
        super().__init__(*args, **kwargs)
        self._serial, self._memory = -1, torch.empty(0, dtype=torch.uint8)
        self._audit: WriteAudit | None = None

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Takes the parameters out of the model, until each layer's weights have come."""
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(self.model)
        self._audit = WriteAudit(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Loads a bucket; its memory is not needed afterwards. (The base class synchronises an accelerator, which CPUs are not.)"""
        with set_current_vllm_config(self.vllm_config):
            self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Bucket) -> None:
        """As ``update_weights``."""
        assert self._audit is not None
        if update_info.serial != self._serial:
            self._memory = open_handle(update_info.handles[device_identity(self.device)], self.device)
            self._serial = update_info.serial
        with loading_parts(), self._audit.counting(enabled=update_info.audit):
            self.model.load_weights(self._audit.watch(self._tensors(update_info.places)))

    def _tensors(self, places: list[Place]) -> Iterator[tuple[str, torch.Tensor]]:
        """Copies: vLLM keeps them until the whole layer has come, which may be in a later bucket."""
        for name, view in views(self._memory, places):
            yield name, view.clone()

    def written(self) -> dict[str, Any]:
        """What the running update wrote, before it is finished; see ``WriteAudit.report``."""
        assert self._audit is not None
        return self._audit.report()

    def finish_weight_update(self) -> None:
        """Puts back what no weight came for."""
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self.model, self.model_config)
        self.shutdown()

    def shutdown(self) -> None:
        """Lets go of the memory."""
        self._serial, self._memory = -1, torch.empty(0, dtype=torch.uint8)

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Older versions of vLLM want the method, for trainers that hold a vLLM of their own."""
        raise RuntimeError("weights are sent by the job's ranks (rlbatch.engines.sender), not by vLLM")


class WorkerExtension:
    """Methods that vLLM's workers get, to be called by name in all of them."""

    weight_transfer_engine: SharedMemoryTransfer

    def rlbatch_written(self) -> dict[str, Any]:
        """As ``SharedMemoryTransfer.written``."""
        report: dict[str, Any] = self.weight_transfer_engine.written()
        return report

    def rlbatch_experts(self) -> dict[str, Any]:
        """This worker's ``device`` and the ``experts`` that it holds; see ``held_experts``."""
        transfer = self.weight_transfer_engine
        return {"device": device_identity(transfer.device), "experts": held_experts(transfer.model)}
