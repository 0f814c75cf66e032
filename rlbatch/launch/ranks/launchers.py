"""What each launcher's variables say of a rank.

The launcher nearest to the process counts: torchrun, then mpirun (Open MPI, then MPICH and Intel MPI), then Slurm's srun. mpirun inside a
Slurm allocation and torchrun under srun inherit the outer launcher's ranks, which number something else; they are not looked at. But if
only some of torchrun's variables are set, or all of them for as many ranks as the outer launcher started, somebody set them by hand, and
they must agree with the launcher's.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace

from rlbatch.api import ConfigError
from rlbatch.launch.ranks.nodelist import expand_nodelist, expand_tasks_per_node
from rlbatch.launch.ranks.variables import LAUNCH_VARIABLE, Variables

MAX_HET_GROUPS = 128
"""Slurm's own limit of a heterogeneous job's components."""


@dataclass(frozen=True)
class RankPosition:
    """A process's place in its job, which each launcher tells in its own way.

    Attributes:
        rank: Rank in the job, from 0.
        world_size: Processes of the job.
        local_rank: Rank on this node, from 0.
        local_size: Processes on this node.
        node_rank: Node, from 0. None: the launcher does not say, and ranks are not spread evenly.
        host: Name of this node.
        nodes: Names of all nodes, by node_rank; empty if the launcher does not say.
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    node_rank: int | None
    host: str
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Names:
    """A launcher's names of the variables that say who a rank is."""

    rank: str
    world_size: str
    local_rank: str
    local_size: str


_TORCHRUN = _Names("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# Not OMPI_COMM_WORLD_NODE_RANK: that is a rank on its node, among the processes of all jobs there.
_OPEN_MPI = _Names("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
# Hydra starts the ranks of MPICH and of Intel MPI.
_HYDRA = _Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_SRUN = _Names("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "")


def find_position(variables: Variables) -> RankPosition:
    """The place that the nearest launcher gave this process; without a launcher that of a job's only process.

    Raises:
        ConfigError: a variable is missing or no number, or two contradict each other.
    """
    is_set = variables.values.keys()
    if is_set >= set(vars(_TORCHRUN).values()):
        _check_set_by_hand(variables)
        return _torchrun(variables)
    if _OPEN_MPI.rank in is_set:
        variables.require_same(_OPEN_MPI.rank, "PMIX_RANK")
        return _mpirun(variables, _OPEN_MPI)
    if _HYDRA.rank in is_set and (_HYDRA.local_rank in is_set or "SLURM_PROCID" not in is_set):  # srun may set PMI_RANK too
        return _mpirun(variables, _HYDRA)
    if "SLURM_PROCID" in is_set and not _is_batch_script(variables):
        return _srun(variables)
    if variables.first(vars(_TORCHRUN).values()):
        return _torchrun(variables)  # names what is missing
    if "PMIX_RANK" in is_set:
        variables.require(_OPEN_MPI.rank)
    host = socket.gethostname()
    return RankPosition(0, 1, 0, 1, 0, host, (host,))


def _check_set_by_hand(variables: Variables) -> None:
    """Refuses torchrun's variables, set by hand, that contradict an outer launcher with as many ranks: these are then the same ranks."""
    if variables.first(["TORCHELASTIC_RUN_ID", LAUNCH_VARIABLE]):  # torchrun did, or our local launcher
        return
    for outer in (_OPEN_MPI, _HYDRA, _SRUN):
        if outer.world_size in variables.values and variables.number(outer.world_size) == variables.number(_TORCHRUN.world_size):
            for hand, launcher in ((_TORCHRUN.rank, outer.rank), (_TORCHRUN.local_rank, outer.local_rank)):
                variables.require_same(launcher, hand)
            return


def _torchrun(variables: Variables) -> RankPosition:
    place = _evenly(variables, _TORCHRUN)
    variables.require("MASTER_ADDR")
    variables.require("MASTER_PORT")
    if "GROUP_RANK" in variables.values:
        if "GROUP_WORLD_SIZE" in variables.values:
            variables.require_less("GROUP_RANK", "GROUP_WORLD_SIZE")
            _check_groups(variables, place)
        place = replace(place, node_rank=variables.number("GROUP_RANK"))
    return place


def _check_groups(variables: Variables, place: RankPosition) -> None:
    """Raises ConfigError for ranks that are not numbered group after group, as torchrun numbers them."""
    group, groups = variables.number("GROUP_RANK"), variables.number("GROUP_WORLD_SIZE")
    if groups * place.local_size == place.world_size and place.rank != group * place.local_size + place.local_rank:
        what = f"with LOCAL_RANK={place.local_rank} of LOCAL_WORLD_SIZE={place.local_size} the second is rank"
        variables.contradict("RANK", "GROUP_RANK", f"{what} {group * place.local_size + place.local_rank}")


def _mpirun(variables: Variables, names: _Names) -> RankPosition:
    place = _evenly(variables, names)
    for hand, ours in zip(vars(_TORCHRUN).values(), vars(names).values(), strict=True):
        variables.require_same(ours, hand)
    allocation = variables.first(["SLURM_JOB_NODELIST"])
    if not place.nodes and allocation:
        nodes = expand_nodelist(variables.values[allocation], allocation)
        if len(nodes) * place.local_size == place.world_size:  # mpirun fills the nodes in this order
            place = replace(place, nodes=tuple(nodes))
    return place


def _evenly(variables: Variables, names: _Names) -> RankPosition:
    """The place of a rank whose launcher does not number the nodes: found if all nodes have equally many ranks."""
    rank, world_size, local_rank, local_size = (variables.number(name) for name in vars(names).values())
    variables.require_less(names.rank, names.world_size)
    variables.require_less(names.local_rank, names.local_size)
    if local_size > world_size:
        variables.contradict(names.local_size, names.world_size, "the first must be at most the second")
    host = socket.gethostname()
    nodes = (host,) if local_size == world_size else ()
    return RankPosition(rank, world_size, local_rank, local_size, _node_rank(rank, world_size, local_rank, local_size), host, nodes)


def _node_rank(rank: int, world_size: int, local_rank: int, local_size: int) -> int | None:
    count, rest = divmod(world_size, local_size)
    if not rest and rank % local_size == local_rank:  # node after node
        return rank // local_size
    if not rest and rank // count == local_rank:  # one on each node, then the next on each
        return rank % count
    return None


def _is_batch_script(variables: Variables) -> bool:
    """Whether this is the batch script itself, which has SLURM_PROCID=0, and not a task of srun; if tasks wait for srun it raises
    ConfigError.
    """
    if variables.values.get("ENVIRONMENT") != "BATCH" or variables.first(["SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"]):
        return False
    tasks = _with_het_groups(variables)
    name = tasks.first(["SLURM_NTASKS", "SLURM_NTASKS_HET_GROUP_*"])
    if name and tasks.number(name) > 1:
        raise ConfigError(f"{name}={tasks.values[name]}: this is the batch script, no rank of a step. Start the ranks with srun.")
    return True


def _srun(variables: Variables) -> RankPosition:
    """Reads the step's variables: those without STEP in their name may be the whole job's, or one component's of a heterogeneous job."""
    variables.require_same("SLURM_JOB_ID", "SLURM_JOBID")
    variables.require_same("SLURM_PROCID", "PMI_RANK", "PMIX_RANK", "RANK")
    variables.require_same("SLURM_LOCALID", "LOCAL_RANK")
    if not variables.first(["SLURM_STEP_NUM_TASKS"]):
        variables.require_same("SLURM_NTASKS", "SLURM_NPROCS")
    variables = _with_het_groups(variables)
    tasks = variables.first(["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_HET_GROUP_*"]) or "SLURM_NTASKS"
    variables.require_less("SLURM_PROCID", tasks)
    variables.require_same(tasks, "PMI_SIZE", "WORLD_SIZE")
    node_rank, world_size, local_rank = (variables.number(name) for name in ("SLURM_NODEID", tasks, "SLURM_LOCALID"))
    node_list, nodes = _slurm_nodes(variables)
    local_size, source = _slurm_local_size(variables, tasks, node_list, len(nodes))
    if local_rank >= local_size:
        variables.contradict("SLURM_LOCALID", source, f"node {node_rank} has {local_size} tasks")
    host = variables.values.get("SLURMD_NODENAME") or socket.gethostname()
    return RankPosition(variables.number("SLURM_PROCID"), world_size, local_rank, local_size, node_rank, host, nodes)


def _slurm_nodes(variables: Variables) -> tuple[str, tuple[str, ...]]:
    """The name of the variable that lists the nodes (empty: none does), and the nodes."""
    names = variables.first(["SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST", "SLURM_JOB_NODELIST_HET_GROUP_*"])
    count = variables.first(["SLURM_STEP_NUM_NODES"])
    if names != "SLURM_STEP_NODELIST":
        count = count or variables.first(["SLURM_NNODES", "SLURM_JOB_NUM_NODES"])
    nodes = expand_nodelist(variables.values[names], names) if names else []
    if names and count and len(nodes) != variables.number(count):
        variables.contradict(names, count, f"the first has {len(nodes)} names")
    if count:
        variables.require_less("SLURM_NODEID", count)
    if names and variables.number("SLURM_NODEID") >= len(nodes):
        variables.contradict("SLURM_NODEID", names, f"the second has {len(nodes)} names")
    if names and "SLURMD_NODENAME" in variables.values:
        if variables.values["SLURMD_NODENAME"] not in nodes:
            variables.contradict("SLURMD_NODENAME", names, "the first must be one of the second")
        expected = nodes[variables.number("SLURM_NODEID")]
        if variables.values["SLURMD_NODENAME"] != expected:
            variables.contradict("SLURMD_NODENAME", "SLURM_NODEID", f"node {variables.number('SLURM_NODEID')} of {names} is {expected}")
    return names, tuple(nodes)


def _slurm_local_size(variables: Variables, tasks: str, node_list: str, nodes: int) -> tuple[int, str]:
    """Tasks of this node, and the name of the variable that says so."""
    world_size = variables.number(tasks)
    name = variables.first(["SLURM_STEP_TASKS_PER_NODE"])
    if not name and tasks != "SLURM_STEP_NUM_TASKS":
        name = variables.first(["SLURM_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE_HET_GROUP_*"])
    if not name:
        if "SLURM_GTIDS" in variables.values:  # of this node
            return variables.values["SLURM_GTIDS"].count(",") + 1, "SLURM_GTIDS"
        if not nodes or world_size % nodes:
            variables.require("SLURM_STEP_TASKS_PER_NODE")
        return world_size // nodes, tasks
    counts = expand_tasks_per_node(variables.values[name], name)
    if sum(counts) != world_size:
        variables.contradict(name, tasks, f"the first sums to {sum(counts)}")
    if nodes and nodes != len(counts):
        variables.contradict(name, node_list, f"the first has {len(counts)} nodes, the second {nodes}")
    node_rank = variables.number("SLURM_NODEID")
    if node_rank >= len(counts):
        variables.contradict("SLURM_NODEID", name, f"the second has {len(counts)} nodes")
    return counts[node_rank], name


def _with_het_groups(variables: Variables) -> Variables:
    """Adds what Slurm says of each component of a heterogeneous job, joined in their order under ``*_HET_GROUP_*``."""
    joined: dict[str, str] = {}
    for name in ("SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS"):
        groups = [f"{name}_HET_GROUP_{group}" for group in range(min(variables.number("SLURM_HET_SIZE", missing=0), MAX_HET_GROUPS))]
        if groups and variables.values.keys() >= set(groups):
            numbers = name == "SLURM_NTASKS"
            joined[f"{name}_HET_GROUP_*"] = (
                str(sum(variables.number(group) for group in groups)) if numbers else ",".join(variables.values[group] for group in groups)
            )
    return Variables(joined | variables.values)
