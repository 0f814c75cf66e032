"""Variables of an engine's processes, and how they are started."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from rlbatch.api import ConfigError


def variables_of(own: Mapping[str, Any]) -> dict[str, str]:
    """The variables in ``rollout.engine.environment``.

    Raises:
        ConfigError: it is no mapping.
    """
    values = own.get("environment", {})
    if not isinstance(values, Mapping):
        raise ConfigError(f"rollout.engine.environment={values}: must map names of variables to texts. Write {{NAME: value}}.")
    return {str(name): str(value) for name, value in values.items()}


def visible_devices(devices: Sequence[str]) -> dict[str, str]:
    """The GPUs of an engine's ranks, and no other; CUDA numbers them within what this process may see."""
    indices = [int(device.partition(":")[2]) for device in devices]
    listed = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return {"CUDA_VISIBLE_DEVICES": ",".join(listed[index] if listed else str(index) for index in indices)}


def exact_variables(dtype: Any) -> dict[str, str]:
    """Variables that let an fp32 engine compute exactly: Triton else multiplies with 10 bits (TF32), and routers choose other experts."""
    return {"TRITON_F32_DEFAULT": "ieee"} if dtype in ("float32", "float") else {}


def process_start(*, on_cpu: bool) -> str:
    """How an engine starts its processes: forked on CPUs, which saves imports, if there are no threads to lose; empty: as it likes."""
    return "fork" if on_cpu and os.environ.get("OMP_NUM_THREADS") == "1" else ""
