"""What was calibrated by runs of a cluster: a file for each cluster, whose values plans take where nobody says others."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rlbatch.api import ConfigError
from rlbatch.config.assumptions import AssumeConfig
from rlbatch.config.bounded_files import read_json
from rlbatch.config.machines import ClusterConfig
from rlbatch.config.schema import Config
from rlbatch.config.structured import from_mapping, show_value

SAME = ("name", "gpu", "gpu_memory_gib", "gpus_per_node", "gpu_bf16_tflops", "gpu_link_gbs", "host_memory_gib")
"""Keys of ``cluster.*`` by which clusters are told apart: a calibration holds only where all of them are the same."""
AGAIN = 'Calibrate it anew with python -m rlbatch.plan calibrate=<run folder>, or leave it out with plan.calibrations="".'


@dataclass(frozen=True)
class Calibration:
    """The content of a calibration file.

    Attributes:
        date: Date of the calibration.
        runs: Run folders.
        device: What the GPUs call themselves.
        cluster: The keys ``SAME`` of ``cluster.*``, and their values.
        assume: Values of ``plan.assume.*``.
    """

    date: str = ""
    runs: tuple[str, ...] = ()
    device: str = ""
    cluster: Mapping[str, Any] = field(default_factory=dict)
    assume: Mapping[str, Any] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """Where the calibrated values come from, in words."""
        return f"calibrated {self.date} on {self.device}: {', '.join(self.runs)}"


def cluster_keys(cluster: ClusterConfig) -> dict[str, Any]:
    """Name -> value of the keys ``SAME`` of a cluster."""
    return {name: getattr(cluster, name) for name in SAME}


def differing(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """The keys in which another cluster differs from the one here, in words; empty if there are none."""
    found = {name: (show_value(there.get(name, "")), show_value(value)) for name, value in here.items() if value != there.get(name)}
    return ", ".join(f"cluster.{name} is {other or 'not said'} there and {own or 'not said'} here" for name, (other, own) in found.items())


def calibration_file(folder: str, cluster: ClusterConfig) -> Path:
    """Where the calibration of a cluster is, or would be."""
    return Path(folder) / f"{Path(cluster.name or cluster.gpu).name}.json"


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Writes a calibration in the place of an earlier one; raises ConfigError if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(calibration), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        said = f"plan.calibrations={path.parent}: {path.name} cannot be written ({error.strerror}). Name another folder."
        raise ConfigError(said) from None


def with_calibration(config: Config, said: Mapping[str, Any]) -> Config:
    """The config with what was calibrated for its cluster, if anything was.

    Args:
        config: Its paths are absolute.
        said: The values of ``plan.assume`` that the user gives, which count.

    Raises:
        ConfigError: the file is damaged, or of another cluster.
    """
    path = calibration_file(config.plan.calibrations, config.cluster)
    if not (config.plan.calibrations and path.is_file()):
        return config
    found, assumed = _read(path)
    if differs := differing(found.cluster, cluster_keys(config.cluster)):
        raise ConfigError(f"plan.calibrations={path.parent}: {path.name} is of another cluster: {differs}. {AGAIN}")
    if not is_gpu(found.device, config.cluster.gpu):
        raise ConfigError(f"{path}: device={found.device}: must be a GPU of cluster.gpu={config.cluster.gpu}. {AGAIN}")
    values: dict[str, Any] = {name: getattr(assumed, name) for name in found.assume if name not in said}
    assume = replace(config.plan.assume, **values)
    return replace(config, plan=replace(config.plan, assume=assume, calibrated=dict.fromkeys(values, found.source)))


def is_gpu(device: str, gpu: str) -> bool:
    """Whether a GPU that calls itself so is of the kind of a ``cluster.gpu``."""
    words, said = (set(re.findall(r"[A-Z0-9]+", name.upper())) for name in (device, gpu))
    return bool(said) and said <= words


def _read(path: Path) -> tuple[Calibration, AssumeConfig]:
    read = read_json(path, AGAIN)
    try:
        found = from_mapping(Calibration, read)
        from_mapping(ClusterConfig, found.cluster, "cluster.")
        return found, from_mapping(AssumeConfig, found.assume, "assume.")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error} {AGAIN}") from None
