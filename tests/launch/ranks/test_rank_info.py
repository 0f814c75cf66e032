"""Who a rank is, and how many GPUs it would see."""

from __future__ import annotations

import importlib.metadata
import re
import socket

import pytest

from rlbatch.api import ConfigError
from rlbatch.launch.ranks.rank_info import RankInfo, visible_gpus

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


def test_torchrun_variables() -> None:
    """torchrun's variables say who a rank is; the node follows from them where GROUP_RANK is not set."""
    info = RankInfo.from_environment(TORCHRUN)
    assert (info.rank, info.world_size, info.local_rank, info.local_size, info.node_rank) == (5, 8, 1, 4, 1)
    assert (info.master_addr, info.master_port) == ("node0", 29500)
    assert RankInfo.from_environment({**TORCHRUN, "GROUP_RANK": "0"}).node_rank == 0
    assert RankInfo.from_environment(info.variables()) == info


@pytest.mark.parametrize("name", TORCHRUN)
def test_missing_variable(name: str) -> None:
    """Outside a job the error names the variable and the command that starts jobs."""
    with pytest.raises(
        ConfigError, match=rf"^{name}=: is not set, so this is no rank of a job\. Start jobs with `python -m rlbatch\.submit`"
    ):
        RankInfo.from_environment({key: value for key, value in TORCHRUN.items() if key != name})


def test_malformed_variable() -> None:
    """A variable that is no number is refused."""
    with pytest.raises(ConfigError, match=r"^RANK=first: must be a number"):
        RankInfo.from_environment({**TORCHRUN, "RANK": "first"})


ALLOCATION = {
    "ENVIRONMENT": "BATCH",
    "SLURM_JOB_ID": "4711",
    "SLURM_JOBID": "4711",
    "SLURM_JOB_NODELIST": "gpu[07-10]",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_NNODES": "4",
    "SLURM_NODELIST": "gpu[07-10]",
    "SLURM_NPROCS": "8",
    "SLURM_NTASKS": "8",
    "SLURM_TASKS_PER_NODE": "2(x4)",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_GTIDS": "0",
    "SLURMD_NODENAME": "gpu07",
}
"""What a batch script sees."""
STEP = {
    **ALLOCATION,
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_STEP_NODELIST": "gpu[08-09]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "3",
    "SLURM_NPROCS": "3",
    "SLURM_TASKS_PER_NODE": "2,1",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_GTIDS": "0,1",
    "SLURMD_NODENAME": "gpu08",
}
"""A task of `srun -n 3 -w gpu[08-09]` in it."""
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "PMIX_RANK": "5",
    "PMIX_NAMESPACE": "prterun-n1-42@1",
}
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
HET = {
    "SLURM_JOB_ID": "4711",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "gpu[1-2]",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "cpu1",
    "SLURM_TASKS_PER_NODE_HET_GROUP_0": "4(x2)",
    "SLURM_TASKS_PER_NODE_HET_GROUP_1": "1",
    "SLURM_NTASKS_HET_GROUP_0": "8",
    "SLURM_NTASKS_HET_GROUP_1": "1",
    "SLURM_PROCID": "8",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
}


def place(variables: dict[str, str]) -> tuple[int, int, int, int, int | None]:
    info = RankInfo.from_environment(variables)
    return info.rank, info.world_size, info.local_rank, info.local_size, info.node_rank


def without(variables: dict[str, str], *parts: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if not any(part in name for part in parts)}


def test_plain() -> None:
    """Without a launcher a process is its job's only one, and has no address to meet at."""
    info = RankInfo.from_environment({"PATH": "/bin", "MASTER_ADDR": "", "RANK": ""})
    host = socket.gethostname()
    assert info == RankInfo(0, 1, 0, 1, 0, host, nodes=(host,))
    with pytest.raises(ConfigError, match=r"^MASTER_ADDR=: is not set, so this is no rank of a job"):
        info.init_method()


def test_init_method() -> None:
    """The address is a URL, also if it is IPv6."""
    assert RankInfo.from_environment(TORCHRUN).init_method() == "tcp://node0:29500"
    assert RankInfo.from_environment({**TORCHRUN, "MASTER_ADDR": "fd00::1"}).init_method() == "tcp://[fd00::1]:29500"


def test_slurm_step() -> None:
    """A task of srun is placed by its step, whatever its allocation is; the node's name is Slurm's."""
    info = RankInfo.from_environment({**STEP, "SLURM_RESTART_COUNT": "2"})
    assert info == RankInfo(1, 3, 1, 2, 0, "gpu08", nodes=("gpu08", "gpu09"), job_id="4711", restart_count=2)
    last = {**STEP, "SLURM_NODEID": "1", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURMD_NODENAME": "gpu09"}
    assert place(last) == (2, 3, 0, 1, 1)
    assert RankInfo.from_environment({**STEP, "MASTER_ADDR": "gpu08", "MASTER_PORT": "20000"}).init_method() == "tcp://gpu08:20000"


@pytest.mark.parametrize(
    "change",
    [
        {"SLURM_NTASKS": "8", "SLURM_NPROCS": "8", "SLURM_NNODES": "4", "SLURM_TASKS_PER_NODE": "2(x4)"},  # srun --preserve-env
        {"SLURM_NPROCS": "2"},  # a heterogeneous step: the component's
        {"SLURM_TASKS_PER_NODE": "64(x4)"},  # an allocation by CPUs
        {"SLURM_JOB_NODELIST": "gpu[08-09]"},  # srun --overlap
        {"SLURM_JOB_NUM_NODES": ""},
        {"PMI_RANK": "1", "PMI_SIZE": "3", "PMIX_RANK": "1"},  # srun --mpi
        {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu08"},  # set by the user's script
    ],
)
def test_the_step_counts(change: dict[str, str]) -> None:
    """What Slurm says of the whole job or of one component does not matter in a step."""
    assert place({**STEP, **change}) == (1, 3, 1, 2, 0)


def test_slurm_without_step_variables() -> None:
    """Fewer variables are enough: the job's, and the ranks of this node or an even spread."""
    job = without(STEP, "STEP", "ENVIRONMENT", "JOB_NUM_NODES") | {"SLURM_JOB_NODELIST": "gpu[08-09]", "SLURM_NODELIST": "gpu[08-09]"}
    assert place(job) == (1, 3, 1, 2, 0)
    assert place(without(job, "TASKS_PER_NODE")) == (1, 3, 1, 2, 0)
    assert place(without({**job, "SLURM_NTASKS": "4", "SLURM_NPROCS": "4"}, "TASKS_PER_NODE", "GTIDS")) == (1, 4, 1, 2, 0)
    with pytest.raises(ConfigError, match=r"^SLURM_STEP_TASKS_PER_NODE=: is not set"):
        place(without(job, "TASKS_PER_NODE", "GTIDS"))


def test_interactive_step() -> None:
    """The shell of salloc and srun --pty is a job of one process, in an allocation of more."""
    shell = {
        **without(ALLOCATION, "NTASKS", "NPROCS", "ENVIRONMENT"),
        "SLURM_STEP_ID": "4294967290",
        "SLURM_STEP_NODELIST": "gpu07",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_STEP_TASKS_PER_NODE": "1",
    }
    assert place(shell) == (0, 1, 0, 1, 0)


def test_batch_script() -> None:
    """The batch script is no rank of its tasks: one of several is refused, an only one is a plain process of the job."""
    with pytest.raises(ConfigError, match=r"^SLURM_NTASKS=8: this is the batch script.* Start the ranks with srun\.$"):
        RankInfo.from_environment(ALLOCATION)
    with pytest.raises(ConfigError, match=r"^SLURM_NTASKS_HET_GROUP_\*=9: this is the batch script"):
        RankInfo.from_environment({**HET, "ENVIRONMENT": "BATCH", "SLURM_PROCID": "0", "SLURM_NODEID": "0"})
    info = RankInfo.from_environment(without(ALLOCATION, "NTASKS", "NPROCS"))
    assert (info.rank, info.world_size, info.job_id) == (0, 1, "4711")


def test_heterogeneous_job() -> None:
    """Components are joined in their order."""
    info = RankInfo.from_environment(HET)
    assert info.nodes == ("gpu1", "gpu2", "cpu1")
    assert place(HET) == (8, 9, 0, 1, 2)
    assert place({**HET, "SLURM_PROCID": "5", "SLURM_NODEID": "1", "SLURM_LOCALID": "1"}) == (5, 9, 1, 4, 1)


@pytest.mark.parametrize("variables", [OPEN_MPI, HYDRA])
def test_mpirun(variables: dict[str, str]) -> None:
    """Open MPI, MPICH and Intel MPI; the node follows from an even spread."""
    assert place(variables) == (5, 8, 1, 2, 2)


def test_open_mpi_job() -> None:
    """Open MPI names its job; all ranks on one node are on this one."""
    assert RankInfo.from_environment(OPEN_MPI).job_id == "prterun-n1-42@1"
    assert RankInfo.from_environment(OPEN_MPI).nodes == ()
    assert RankInfo.from_environment({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "5"}).nodes == (
        socket.gethostname(),
    )


@pytest.mark.parametrize(
    ("rank", "size", "local_rank", "local_size", "node"),
    [
        (3, 8, 3, 4, 0),
        (6, 8, 2, 4, 1),
        (5, 8, 2, 4, 1),  # by node: 0 2 4 6 and 1 3 5 7
        (5, 6, 1, 3, None),
        (2, 3, 0, 2, None),
    ],
)
def test_node_of_mpirun(rank: int, size: int, local_rank: int, local_size: int, node: int | None) -> None:
    """Ranks fill node after node, or go around the nodes; anything else leaves the node open."""
    values = map(str, (rank, size, local_rank, local_size))
    assert place(dict(zip(HYDRA, values, strict=True)))[-1] == node


@pytest.mark.parametrize("variables", [OPEN_MPI, HYDRA])
def test_mpirun_in_slurm(variables: dict[str, str]) -> None:
    """mpirun in a batch script, or through srun's daemons, wins over Slurm, which gives job, restarts and the nodes if all are used."""
    for outer in (ALLOCATION, STEP):
        info = RankInfo.from_environment({**outer, **variables, "SLURM_RESTART_COUNT": "1"})
        assert (info.rank, info.world_size, info.local_size, info.node_rank) == (5, 8, 2, 2)
        assert (info.host, info.job_id, info.restart_count) == (socket.gethostname(), "4711", 1)
        assert info.nodes == ("gpu07", "gpu08", "gpu09", "gpu10")
    assert RankInfo.from_environment({**ALLOCATION, **variables, "SLURM_JOB_NODELIST": "gpu[07-11]"}).nodes == ()


def test_torchrun_in_others() -> None:
    """torchrun under srun, or one by mpirun on each node, wins over them."""
    torchrun = {**TORCHRUN, "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "3"}
    for outer in (STEP, OPEN_MPI, HYDRA):
        assert place({**outer, **torchrun}) == (5, 8, 1, 4, 1)
    assert RankInfo.from_environment({**STEP, **torchrun}).job_id == "4711"
    alone = RankInfo.from_environment(torchrun)
    assert (alone.job_id, alone.restart_count) == ("", 3)


@pytest.mark.parametrize(
    ("variables", "first", "second"),
    [
        ({**OPEN_MPI, "PMIX_RANK": "4"}, "OMPI_COMM_WORLD_RANK=5", "PMIX_RANK=4"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "5"}, "OMPI_COMM_WORLD_RANK=5", "OMPI_COMM_WORLD_SIZE=5"),
        ({**OPEN_MPI, "WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE=8", "WORLD_SIZE=4"),
        ({**HYDRA, "MPI_LOCALRANKID": "2"}, "MPI_LOCALRANKID=2", "MPI_LOCALNRANKS=2"),
        ({**HYDRA, "MPI_LOCALNRANKS": "9"}, "MPI_LOCALNRANKS=9", "PMI_SIZE=8"),
        ({**HYDRA, "RANK": "0"}, "PMI_RANK=5", "RANK=0"),
        ({**TORCHRUN, "WORLD_SIZE": "5"}, "RANK=5", "WORLD_SIZE=5"),
        ({**TORCHRUN, "GROUP_RANK": "2", "GROUP_WORLD_SIZE": "2"}, "GROUP_RANK=2", "GROUP_WORLD_SIZE=2"),
        ({**STEP, "SLURM_PROCID": "3"}, "SLURM_PROCID=3", "SLURM_STEP_NUM_TASKS=3"),
        ({**STEP, "PMI_RANK": "0"}, "SLURM_PROCID=1", "PMI_RANK=0"),
        ({**STEP, "RANK": "0"}, "SLURM_PROCID=1", "RANK=0"),
        ({**STEP, "LOCAL_RANK": "0"}, "SLURM_LOCALID=1", "LOCAL_RANK=0"),
        ({**STEP, "WORLD_SIZE": "2"}, "SLURM_STEP_NUM_TASKS=3", "WORLD_SIZE=2"),
        ({**STEP, "SLURM_JOBID": "1"}, "SLURM_JOB_ID=4711", "SLURM_JOBID=1"),
        ({**STEP, "SLURM_STEP_NUM_NODES": "3"}, "SLURM_STEP_NODELIST=gpu[08-09]", "SLURM_STEP_NUM_NODES=3"),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, "SLURM_STEP_TASKS_PER_NODE=2(x2)", "SLURM_STEP_NUM_TASKS=3"),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "3"}, "SLURM_STEP_TASKS_PER_NODE=3", "SLURM_STEP_NODELIST=gpu[08-09]"),
        ({**STEP, "SLURM_NODEID": "2"}, "SLURM_NODEID=2", "SLURM_STEP_NUM_NODES=2"),
        ({**STEP, "SLURM_NODEID": "2", "SLURM_STEP_NUM_NODES": ""}, "SLURM_NODEID=2", "SLURM_STEP_NODELIST=gpu[08-09]"),
        ({**STEP, "SLURM_LOCALID": "2"}, "SLURM_LOCALID=2", "SLURM_STEP_TASKS_PER_NODE=2,1"),
        ({**without(STEP, "NODELIST", "NODES"), "SLURM_NODEID": "2"}, "SLURM_NODEID=2", "SLURM_STEP_TASKS_PER_NODE=2,1"),
        ({**STEP, "SLURMD_NODENAME": "gpu07"}, "SLURMD_NODENAME=gpu07", "SLURM_STEP_NODELIST=gpu[08-09]"),
        ({**without(STEP, "STEP", "ENVIRONMENT"), "SLURM_NPROCS": "4"}, "SLURM_NTASKS=3", "SLURM_NPROCS=4"),
        (without({**STEP, "SLURM_NNODES": ""}, "STEP", "ENVIRONMENT", "SLURM_NODELIST") | {"SLURM_JOB_NUM_NODES": "2"},
         "SLURM_JOB_NODELIST=gpu[07-10]", "SLURM_JOB_NUM_NODES=2"),
    ],
)  # fmt: skip
def test_contradictions(variables: dict[str, str], first: str, second: str) -> None:
    """Two variables that cannot both be true are named, with their values."""
    with pytest.raises(ConfigError, match=f"^{re.escape(first)} and {re.escape(second)}: contradict each other, .*(must|has|sums)"):
        RankInfo.from_environment(variables)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (without(OPEN_MPI, "LOCAL_SIZE"), "OMPI_COMM_WORLD_LOCAL_SIZE=: is not set"),
        ({"PMIX_RANK": "3"}, "OMPI_COMM_WORLD_RANK=: is not set"),
        ({"PMI_RANK": "3", "PMI_SIZE": "4"}, "MPI_LOCALRANKID=: is not set"),
        (without(STEP, "LOCALID"), "SLURM_LOCALID=: is not set"),
        ({"SLURM_PROCID": "0"}, "SLURM_NTASKS=: is not set"),
        ({**STEP, "SLURM_PROCID": "-1"}, "SLURM_PROCID=-1: must be a number"),
        ({**STEP, "SLURM_PROCID": "１"}, r"SLURM_PROCID=\uff11: must be a number"),
        ({**STEP, "SLURM_PROCID": "1" * 5000}, "SLURM_PROCID=111"),
        ({**STEP, "SLURM_STEP_NODELIST": "gpu[08-"}, "SLURM_STEP_NODELIST=gpu[08-: brackets must be closed"),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "2;1"}, "SLURM_STEP_TASKS_PER_NODE=2;1: must be counts"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT=70000: must be from 1 to 65535"),
        ({**TORCHRUN, "MASTER_PORT": "0"}, "MASTER_PORT=0: must be from 1 to 65535"),
    ],
)
def test_faulty_variables(variables: dict[str, str], message: str) -> None:
    """What is missing or malformed is named."""
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        RankInfo.from_environment(variables)


@pytest.mark.parametrize(
    ("torch_version", "chosen", "gpus"),
    [("2.13.0+cpu", "0,1", 0), ("2.13.0", "0,1", 2), ("2.13.0", "", 0), ("2.13.0", "-1", 0), (None, "0,1,2", 3)],
)
def test_visible_gpus(monkeypatch: pytest.MonkeyPatch, torch_version: str | None, chosen: str, gpus: int) -> None:
    """CUDA_VISIBLE_DEVICES counts, unless the installed torch has no CUDA; without torch it still does."""

    def version(name: str) -> str:
        if torch_version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return torch_version

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert visible_gpus() == gpus


BY_HAND = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
SRUN_STEP = {
    "SLURM_PROCID": "3",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "n[1-2]",
}


def test_all_torchrun_variables_set_by_hand() -> None:
    """For as many ranks as srun started they must agree with it; torchrun's own ranks under srun, and our local launcher's, need not."""
    assert RankInfo.from_environment({**SRUN_STEP, **BY_HAND, "RANK": "3", "LOCAL_RANK": "1"}).rank == 3
    wrong = {**SRUN_STEP, **BY_HAND, "RANK": "0", "LOCAL_RANK": "0"}
    with pytest.raises(ConfigError, match=r"^SLURM_PROCID=3 and RANK=0: contradict each other"):
        RankInfo.from_environment(wrong)
    for launcher in ("TORCHELASTIC_RUN_ID", "RLBATCH_LAUNCH"):
        assert RankInfo.from_environment({**wrong, launcher: "x"}).rank == 0
    assert RankInfo.from_environment({**wrong, "WORLD_SIZE": "8"}).rank == 0


def test_groups_of_torchrun_that_do_not_fit() -> None:
    """torchrun numbers ranks group after group: another rank is set by hand."""
    with pytest.raises(ConfigError, match=r"^RANK=5 and GROUP_RANK=0: contradict each other, with LOCAL_RANK=1 of LOCAL_WORLD_SIZE=4"):
        RankInfo.from_environment({**TORCHRUN, "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "2"})


def test_node_that_is_another_one() -> None:
    """The node's name must be that of its number: by the numbers ranks are told where rank 0 is."""
    assert RankInfo.from_environment({**SRUN_STEP, "SLURMD_NODENAME": "n2"}).host == "n2"
    with pytest.raises(
        ConfigError, match=r"^SLURMD_NODENAME=n1 and SLURM_NODEID=1: contradict each other, node 1 of SLURM_STEP_NODELIST is n2"
    ):
        RankInfo.from_environment({**SRUN_STEP, "SLURMD_NODENAME": "n1"})
