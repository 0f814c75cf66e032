"""Loads weights into vLLM's workers, out of memory that the trainer shares; registered with vLLM under the name ``rlbatch``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.logger import init_logger
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rlbatch.engines.transfer.checksums import Part, came
from rlbatch.engines.transfer.receiver import WeightReceiver
from rlbatch.engines.transfer.shared_memory import device_identity
from rlbatch.engines.transfer.weight_group import WeightGroup

from .replay.borrowed_tensors import BorrowedTensors, refuse_kept
from .replay.copy_plan import Plan, PreparedCall, Replay, TiedLayers
from .replay.held_weights import HeldWeights
from .replay.recorder import Recorder
from .seeded_draws import draw_by_seeds
from .versions import loading_parts
from .write_audit import SCALES, WriteAudit, check_values


@dataclass
class NoInit(WeightTransferInitInfo):  # type: ignore[misc]
    """There is nothing to agree on beforehand."""


@dataclass
class Bucket(WeightTransferUpdateInfo):  # type: ignore[misc]
    """What one call brings.

    Attributes:
        devices: See ``WeightReceiver.tensors``.
        audit: Whether every write is counted.
        replay: Whether a plan may be used: the update that it was recorded from was as it must be.
        check: Whether what the model holds will be compared: see ``SharedMemoryTransfer.held``.
    """

    devices: dict[str, Any]
    audit: bool = field(default=False)
    replay: bool = field(default=False)
    check: bool = field(default=False)


class SharedMemoryTransfer(WeightTransferEngine):  # type: ignore[misc]
    """A worker's end. vLLM collects the tensors of a layer and writes them into the parameters that it has: CUDA graphs stay valid.

    What it does is recorded; later updates copy what they can without it.
    """

    init_info_cls = NoInit
    update_info_cls = Bucket

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Called by vLLM, with the model."""
        super().__init__(*args, **kwargs)
        self.receiver = WeightReceiver(self.device)
        self._audit: WriteAudit | None = None
        self._recorder: Recorder | None = None
        self._replay: Replay | None = None
        self._plan: Plan | None = None
        self._ties = TiedLayers(frozenset(), ())
        self._prepared: dict[str, PreparedCall] = {}
        self._borrowed: dict[str, StorageWeakRef] = {}
        self._held, self._came = HeldWeights(self.model), dict[str, Part]()

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Nothing to do yet: the first call says how."""
        self._audit = self._recorder = self._replay = None
        self._borrowed = {}

    def _start(self, *, may_replay: bool) -> None:
        """Begins an update: by the plan, or by taking the parameters out of the model until each layer's weights have come."""
        is_draft = self.model is not self._default_model
        if not is_draft:
            self._came = {}
        if may_replay and not is_draft and self._plan is not None and self._plan.is_valid():
            self._replay, self._ties = Replay(self._plan, self._prepared), self._plan.ties
            return
        self._ties = TiedLayers.of(self.model)
        initialize_layerwise_reload(self.model)
        if not (is_draft or self.parallel_config.enable_eplb):  # else vLLM moves experts between workers
            self._recorder = Recorder(self.model)
        # A draft has its embedding and output layer from the model: they come with that one's weights.
        self._audit = WriteAudit(self.model, self._default_model.parameters() if is_draft else (), self._ties.names)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Loads what a call brings; its memory, unless it lasts, is not needed afterwards. (The base class waits, also on CPUs.)"""
        with set_current_vllm_config(self.vllm_config):
            self.receive_weights(self.parse_update_info(update_info))
        if self._replay is None or not self.receiver.all_last:
            _wait()

    def receive_weights(self, update_info: Bucket) -> None:
        """Loads what a call brings; see ``update_weights``."""
        if self._audit is None and self._replay is None:
            self._start(may_replay=update_info.replay)
        key, tensors = self.receiver.tensors(update_info.devices)
        if update_info.audit:
            check_values(tensors)
        if update_info.check and self.model is self._default_model:
            known = self._held.names if self._replay is not None else set()
            self._came |= {part[0]: part for part in came([(name, tensor) for name, tensor in tensors if name not in known])}
        if self._replay is not None:
            tensors = self._replay.copy(key, tensors)
        if tensors:
            self._audit = self._audit or WriteAudit(self.model)
            self._load(tensors, audit=update_info.audit)

    def _load(self, tensors: Sequence[tuple[str, torch.Tensor]], *, audit: bool) -> None:
        """Loads by vLLM's loaders, which may keep tensors until the whole layer has come, maybe in a later call."""
        assert self._audit is not None
        call = None if self._recorder is None else BorrowedTensors(self._recorder)
        borrowed = ((name, tensor.clone() if call is None else call.borrow(name, tensor)) for name, tensor in tensors)
        with loading_parts(), self._recording(), self._audit.counting(enabled=audit):
            self.model.load_weights(self._audit.watch(borrowed))
        if call is not None:
            self._borrowed |= call.end(self.receiver.lasting)

    def _recording(self) -> AbstractContextManager[None]:
        return nullcontext() if self._recorder is None else self._recorder.recording()

    def written(self) -> dict[str, Any]:
        """What the running update wrote, before it is finished; see ``WriteAudit.report``."""
        assert self._audit is not None
        return self._audit.report()

    def held(self) -> list[Part]:
        """Checksums of what the model holds now of the last update's tensors; of those that cannot be read back, as they came."""
        names = self._held.names
        parts = self._held.checksums()
        others = [part for name, part in self._came.items() if name not in names]
        if others:
            said = "rlbatch: %d tensors are compared as they came, since kernels have them in a layout of their own: %s, ..."
            init_logger("vllm.rlbatch").info(said, len(others), others[0][0])
        return parts + others

    def finish_weight_update(self) -> None:
        """Puts back what no weight came for."""
        with set_current_vllm_config(self.vllm_config):
            if self._audit is None and self._replay is None:
                self._start(may_replay=False)
            if self._replay is not None:
                self._replay.finish(self.model_config)
                self._prepared = self._replay.prepared
            else:
                with self._recording():
                    finalize_layerwise_reload(self.model, self.model_config)
                if self._audit is not None and self._audit.is_counting:
                    check_values((name, parameter) for name, parameter in self.model.named_parameters() if name.endswith(SCALES))
                if self.model is self._default_model:
                    self._plan, self._prepared = None if self._recorder is None else self._recorder.plan(self._ties), {}
                    self._held = HeldWeights(self.model) if self._recorder is None else self._recorder.held
                    init_logger("vllm.rlbatch").info("rlbatch: later weight syncs %s", self._plan or "go through vLLM's loaders")
            self._ties.finish()
        _wait()
        self._recorder = self._replay = None
        refuse_kept(self._borrowed)
        self._borrowed = {}
        self.receiver.finish()

    def shutdown(self) -> None:
        """Nothing to do: what is open ends with the process."""

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Older versions of vLLM want the method, for trainers that hold a vLLM of their own."""
        raise RuntimeError("weights are sent by the job's ranks (rlbatch.engines.transfer.sender), not by vLLM")


def _wait() -> None:
    """Waits for what the device was given to do."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


class WorkerExtension:
    """Methods that vLLM's workers get, to be called by name in all of them."""

    weight_transfer_engine: SharedMemoryTransfer

    def rlbatch_load(self, update_info: dict[str, Any], *, starts: bool, is_draft: bool, ends: bool) -> None:
        """vLLM's ``start_weight_update``, ``update_weights`` and ``finish_weight_update`` in one call."""
        worker: Any = self
        if starts:
            (worker.start_draft_weight_update if is_draft else worker.start_weight_update)()
        worker.update_weights(update_info)
        if ends:
            worker.finish_weight_update()

    def rlbatch_written(self) -> dict[str, Any]:
        """Reports what was written; see ``SharedMemoryTransfer.written``."""
        report: dict[str, Any] = self.weight_transfer_engine.written()
        return report

    def rlbatch_held(self) -> list[Part]:
        """Checksums of what this worker's modules hold; see ``SharedMemoryTransfer.held``."""
        return self.weight_transfer_engine.held()

    def rlbatch_join(self, path: str, first: int, size: int, limit_s: float) -> None:
        """Joins a group; ``first`` is the place of this worker's replica in it."""
        transfer = self.weight_transfer_engine
        place = first + transfer.parallel_config.rank
        transfer.receiver.join(WeightGroup(Path(path), place, size, transfer.device, limit_s))

    def rlbatch_wait(self) -> None:
        """Waits until the device has done what this worker gave it to do before."""
        _wait()

    def rlbatch_draw(self) -> None:
        """See ``draw_by_seeds``."""
        draw_by_seeds(vars(self)["model_runner"])

    def rlbatch_experts(self) -> dict[str, Any]:
        """This worker's ``device``, the ``experts`` that it holds (see ``held_experts``), and the ids of its ``processes``."""
        transfer = self.weight_transfer_engine
        processes = [os.getppid(), os.getpid()]  # the scheduler's too; where that is the worker itself, the host's
        return {"device": device_identity(transfer.device), "experts": held_experts(transfer.model), "processes": processes}


def held_experts(model: Any) -> list[int] | None:
    """Numbers of the routed experts that a worker's model has in every layer, ascending.

    Returns:
        None: there are none, or one list does not say it, because layers differ or vLLM moves experts between workers.
    """
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    held: set[tuple[int, ...]] = set()
    for module in model.modules():
        if isinstance(module, RoutedExperts):
            if module.moe_config.moe_parallel_config.enable_eplb:
                return None
            held.add(tuple(module.expert_map_manager.get_local_expert_ids()))
    return sorted(held.pop()) if len(held) == 1 else None
