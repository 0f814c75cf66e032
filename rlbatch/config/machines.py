"""Keys of what a job runs on, ``cluster.*``, and of how its ranks meet, ``launch.*``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from rlbatch.api.values import CountOrZero, PathRule, Range, Seconds
from rlbatch.config.keys import Amount, OwnPath, key


@dataclass(frozen=True)
class ClusterConfig:
    """``+cluster=<name>`` and ``cluster.*``: the machines of a job."""

    name: str = key("", "The cluster.")
    model: str = key("", "What is trained if `model=` does not say: a choice of model; empty: the experiment's.")
    gpus: Annotated[int, Range(least=0, most=2**20)] = key(0, "GPUs that a job may take; 0: layout.world_size.")
    gpus_per_node: Annotated[int, Range(above=0, most=1024)] = key(8, "GPUs (and ranks) of a node.")
    gpu: str = key("", "Kind of GPU, e.g. H100; empty: not said.")
    gpu_memory_gib: Amount = key(0.0, "Memory of a GPU, GiB; 0: not said.")
    gpu_bf16_tflops: Amount = key(
        0.0, "Dense bf16 peak of a GPU, TFLOP/s, of which `perf/mfu` is a share; 0: by the name of the GPU, or measured."
    )
    gpu_link_gbs: Amount = key(0.0, "NVLink bandwidth of a GPU, one direction, GB/s; 0: not said.")
    host_memory_gib: Amount = key(0.0, "Memory of a node, GiB; 0: not said.")
    storage_gbs: Annotated[float, Range(least=1e-3, most=1e6)] = key(
        1.0, "Rate at which the whole job writes checkpoints, GB/s, until one was measured."
    )
    partition: str = key("", "Slurm partition; empty: the default one.")
    account: str = key("", "Slurm account; empty: the default one.")
    qos: str = key("", "Slurm quality of service; empty: the default one.")
    time_limit: str = key("", "Slurm time limit, e.g. 1-00:00:00; empty: the partition's.")
    constraint: str = key("", "Slurm node features, e.g. h100; empty: any.")
    exclusive: bool = key(True, "Whether nodes are the job's alone.")
    cpus_per_task: Annotated[int, Range(least=0, most=65535)] = key(
        0, "CPUs of a rank, for nodes that are shared; 0: not said, which is right for exclusive nodes."
    )
    gres: str = key("gpu", "Generic resource name of GPUs, `gpu` or `gpu:<type>`; empty: nodes have no GPUs to ask for.")
    sbatch_options: tuple[str, ...] = key((), "Further options of sbatch, e.g. --reservation=rl.")
    container: Literal["none", "pyxis", "apptainer"] = key("none", "What runs the ranks: the host itself, pyxis/enroot or apptainer.")
    container_image: Annotated[str, PathRule(is_for_ranks=False, is_guess=True)] = key("", "Image of the container.")
    container_mounts: tuple[Annotated[str, PathRule(is_for_ranks=False, is_guess=True)], ...] = key(
        (), "Folders that the container sees, as host:container."
    )
    environment: Mapping[str, str] = key({}, "Environment variables of every rank: text, passed on as it is typed.")
    hostfile: OwnPath = key("", "Nodes for mpirun, one a line; empty: this machine.")
    interface: str = key(
        "",
        "Network interface between nodes, e.g. bond0; of several (ib0,ib1) ranks meet at the first; empty: the one to the first node.",
    )


@dataclass(frozen=True)
class LaunchConfig:
    """``launch.*``: how ranks meet, and how long they may be silent."""

    rendezvous_timeout_s: Seconds = key(600.0, "Seconds until the job ends because ranks did not come.")
    collective_timeout_s: Seconds = key(600.0, "Seconds until a collective of torch.distributed gives up.")
    preflight: bool = key(True, "Check nodes, versions, memory, folders and collectives before the model is built.")
    start_limit_s: Seconds = key(3600.0, "Hang limit of loading: seconds from the rendezvous to the first step.")
    generation_limit_s: Seconds = key(7200.0, "Hang limit of generation and rewards of a step or an evaluation, seconds.")
    training_limit_s: Seconds = key(3600.0, "Hang limit of everything else in a step (sync, exchange, log-probs, update), seconds each.")
    checkpoint_limit_s: Seconds = key(3600.0, "Hang limit of a checkpoint or an export, seconds.")
    notice_s: Annotated[int, Range(above=0, most=65535)] | None = key(
        None, "Seconds before the time limit at which Slurm announces it; null: from the size of a checkpoint and the storage."
    )
    max_idle_requeues: CountOrZero = key(3, "Requeues in a row without a new step after which the job ends instead.")
