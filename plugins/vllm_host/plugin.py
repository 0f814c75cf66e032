"""The entry point that vLLM calls in each of its processes (group ``vllm.general_plugins``), maybe more than once."""

from __future__ import annotations

from rlbatch.engines.protocol.shared_names import name_shared_memory

from . import workarounds
from .engine_options import WEIGHT_BACKEND
from .versions import installed_version


def register() -> None:
    """Offers our weight transfer and applies the workarounds."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    name_shared_memory()
    if WEIGHT_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(WEIGHT_BACKEND, "rlbatch_plugins.vllm_host.weight_transfer", "SharedMemoryTransfer")
    workarounds.apply_all(installed_version(), is_cpu=current_platform.is_cpu())
