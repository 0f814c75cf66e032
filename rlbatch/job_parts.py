"""What a job consists of, as its config says it: model, nodes, engines. Imports no torch."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rlbatch.api import ConfigError, ModelFamily, RlbatchError
from rlbatch.config.evaluation import eval_sets
from rlbatch.config.hf_config import read_config
from rlbatch.config.keys import EMBEDDED
from rlbatch.config.paths import check_variable
from rlbatch.config.schema import Config
from rlbatch.launch.ranks.rank_info import visible_gpus
from rlbatch.plan.engine_memory import MemoryInputs, memory_inputs
from rlbatch.plan.engine_plan import EnginePlan
from rlbatch.plan.layout import check_layout
from rlbatch.plan.nodes import Placement, place_ranks
from rlbatch.plan.parameters import ModelSize
from rlbatch.registry import Registry

if TYPE_CHECKING:
    from rlbatch.launch.starters.hostfile import Host


def model_family(config: Config, registry: Registry, run_dir: Path) -> ModelFamily:
    """The family of ``model.hf``; raises RlbatchError if there is no such folder, or no plugin for it."""
    return registry.resolve_model_family(read_config(model_folder(config, run_dir)))


def known_family(config: Config, registry: Registry, run_dir: Path) -> ModelFamily | None:
    """The family of ``model.hf``; None: it is not known, which another check tells."""
    try:
        return model_family(config, registry, run_dir)
    except RlbatchError:
        return None


def model_folder(config: Config, run_dir: Path) -> Path:
    """The Hugging Face folder of the job."""
    check_variable("model.hf", config.model.hf)
    return run_dir / EMBEDDED / "model" if config.model.hf == EMBEDDED else Path(config.model.hf)


def parameter_count(config: Config, family: ModelFamily | None) -> float:
    """Parameters of the model, from its family, else ``model.parameters``; 0 if neither is known."""
    return ModelSize(family).total.total if family else config.model.parameters


def on_gpu(config: Config) -> bool:
    """Whether the ranks will have GPUs: of this machine if they start here, else as the cluster says."""
    return visible_gpus() > 0 if config.launcher == "local" else bool(config.cluster.gres)


def write_embedded(config: Config, run_dir: Path) -> None:
    """Makes the embedded task, if the job uses it."""
    if EMBEDDED in (config.model.hf, config.data.train, *(each.file for each in eval_sets(config).values())):
        from rlbatch.prompts.embedded import write_embedded_task

        write_embedded_task(run_dir / EMBEDDED, config.seed)


def mpi_hosts(config: Config, registry: Registry) -> tuple[Host, ...]:
    """The hosts that mpirun starts ranks on; raises as ``read_hosts``."""
    from rlbatch.launch.starters.mpirun import read_hosts  # most jobs need none of what starts ranks

    return read_hosts(config, registry.separate_gpus(config) or config.cluster.gpus_per_node)


def node_ranks(registry: Registry, config: Config) -> tuple[int, ...] | None:
    """How many ranks each node will have; None: the hostfile cannot be read. Nodes that would not all be full raise ConfigError."""
    if config.launcher == "local":
        return (config.layout.world_size,)
    if config.launcher != "mpi":
        where = place_ranks(config, registry)
        return (where.ranks_per_node,) * where.nodes
    with suppress(RlbatchError):  # told where the hosts are shown
        return tuple(host.slots or 1 for host in mpi_hosts(config, registry))
    return None


def planned_nodes(registry: Registry, config: Config) -> tuple[int, ...]:
    """How many ranks each node will have, on the cluster of the config also where the ranks would start on this machine.

    Raises:
        ConfigError: nodes that would not all be full.
    """
    if config.launcher == "mpi" and (ranks := node_ranks(registry, config)):
        return ranks
    where = place_ranks(config, registry)
    return (where.ranks_per_node,) * where.nodes


def placement(config: Config, registry: Registry) -> Placement | None:
    """Tells where ranks will be; None: the hostfile's hosts take differently many, or there is no such file. Raises as ``node_ranks``."""
    ranks = node_ranks(registry, config)
    return Placement(len(ranks), ranks[0]) if ranks and len(set(ranks)) == 1 else None


def engine_plan(config: Config, registry: Registry) -> EnginePlan:
    """The job's engines.

    Raises:
        ConfigError: nodes or engines that would not be full, options of the engine that contradict each other.
    """
    return EnginePlan(config, registry, registry.ranks_per_engine(config), registry.engine_shape(config), placement(config, registry))


def job_memory_inputs(config: Config, registry: Registry, family: ModelFamily | None) -> MemoryInputs | None:
    """What takes memory; None: the model cannot be divided so, which another check tells.

    Raises:
        RlbatchError: options that cannot be.
    """
    if family is not None:
        try:
            check_layout(config.layout, family, on_gpu=on_gpu(config))
        except ConfigError:
            return None
    return memory_inputs(config, registry, family, on_gpu=on_gpu(config))


def check_engines(config: Config, registry: Registry, family: ModelFamily | None) -> None:
    """An engine holds the whole model, on its rank's GPU or on those of the ranks that share it.

    Raises:
        ConfigError: engines that cannot be.
    """
    plan = engine_plan(config, registry)
    plan.check_context()
    plan.check_shortest()
    plan.check_nodes()
    plan.check_separate_gpus()
    if family is not None:
        plan.check_experts(family)
        plan.check_heads(family, on_gpu=on_gpu(config))
