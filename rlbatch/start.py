"""Starts a job in each of the ways that ``launcher`` names. Imports no torch."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

from rlbatch.api import ConfigError
from rlbatch.api.exit_codes import FAILED
from rlbatch.config.schema import Config
from rlbatch.job_parts import model_family, mpi_hosts, parameter_count
from rlbatch.launch.jobs import JobRecord, follow, new_record, process_id
from rlbatch.launch.records.disk import as_config_errors
from rlbatch.launch.records.failures import read_first_error
from rlbatch.launch.records.ownership import run_folder_lock
from rlbatch.launch.records.streams import LOGS, MERGED_LOG, fall_back_to, rank_log
from rlbatch.launch.shutdown.grace_period import notice_s
from rlbatch.launch.slurm.queue import job_state, queued_state
from rlbatch.launch.slurm.scontrol import current_job_name
from rlbatch.launch.starters.container import cluster_variables, in_container, python, srun_options
from rlbatch.launch.starters.local import run_local
from rlbatch.launch.starters.mpirun import DRY_RUN, find_mpi, mpi_job, run_mpi
from rlbatch.launch.starters.sbatch import SRUN, batch_script, job_name
from rlbatch.metrics.report import record_end
from rlbatch.plan.nodes import place_ranks
from rlbatch.prepare import prepared_run
from rlbatch.registry import Registry


@dataclass(frozen=True)
class Program:
    """What the ranks of a job run, and what prepares it.

    Attributes:
        module: What each rank runs, with ``--run-dir``, or by its ``run_process``.
        prepared: Makes and checks the run folder, as ``prepared_run`` does.
    """

    module: str
    prepared: Callable[[Config, Registry], AbstractContextManager[tuple[Config, Path]]]


RUN = Program("rlbatch.run", prepared_run)
"""Trains or evaluates."""
TASK_VARIABLES: Mapping[str, str] = {"SUBMITIT_EXECUTOR": "slurm", "SUBMITIT_LOG_LEVEL": "CRITICAL"}
"""How submitit's loader knows where it runs; what it tells of each rank would fill the merged log."""


def start(config: Config, registry: Registry, program: Program = RUN) -> int:
    """Prepares the run folder and starts the job, or hands it to Slurm.

    Returns:
        The exit code.

    Raises:
        RlbatchError: what was refused.
    """
    starters = {"local": _start_local, "slurm": _start_slurm, "mpi": _start_mpi, "none": _start_nothing}
    return starters[config.launcher](config, registry, program)


def rank_command(config: Config, run_dir: Path, module: str = RUN.module) -> list[str]:
    """What each rank runs under mpirun, or under srun in a batch script of the user's."""
    return in_container(config.cluster, [python(config.cluster), "-m", module, "--run-dir", str(run_dir)])


def slurm_script(config: Config, registry: Registry, run_dir: Path, parameters: float) -> str:
    """The batch script that is given to sbatch.

    Raises:
        ConfigError: ranks that do not fill nodes or a notice that is too long.
    """
    from rlbatch.launch.starters.submitit_executor import task_command

    notice = notice_s(config, parameters, run_dir)
    command = in_container(config.cluster, task_command(python(config.cluster), run_dir))
    return batch_script(config, place_ranks(config, registry), run_dir, notice, TASK_VARIABLES, command)


def _start_local(config: Config, registry: Registry, program: Program) -> int:
    with program.prepared(config, registry) as (config, run_dir):
        pass
    with run_folder_lock(run_dir), as_config_errors(run_dir):
        fall_back_to(rank_log(run_dir, 0))
        print(f"Run folder: {run_dir}", flush=True)
        os.environ.update(cluster_variables(config.cluster))
        return _settled(run_dir, run_local(config, run_dir, [sys.executable, "-m", program.module, "--run-dir", str(run_dir)], is_run=True))


def _start_slurm(config: Config, registry: Registry, program: Program) -> int:
    if shutil.which("sbatch") is None:
        raise ConfigError(f"launcher=slurm: there is no sbatch on this machine. Submit from a login node of the cluster. {DRY_RUN}")
    place_ranks(config, registry)
    with program.prepared(config, registry) as (config, run_dir):
        from rlbatch.launch.starters.submitit_executor import submit_batch

        (run_dir / LOGS).mkdir(exist_ok=True)
        size = parameter_count(config, model_family(config, registry, run_dir))
        job_id = submit_batch(slurm_script(config, registry, run_dir, size), run_dir, config, program.module)
        record = new_record(job_id, "slurm", job_name(config), run_dir, str(run_dir / MERGED_LOG))
    _tell(record)
    return follow(record) if config.follow else 0


def _tell(record: JobRecord) -> None:
    state = queued_state(record.job_id)
    why = f" ({state.reason})" if state.reason else f" on {state.nodes}" if state.nodes else ""
    print(
        f"Submitted job {record.job_id} ({record.name}): {state.state}{why}\n"
        f"  run folder  {record.run_dir}\n"
        f"  log         {record.log} (rank 0 and the first error; other ranks: {Path(record.log).parent}/rank<N>.log)\n"
        f"  follow      python -m rlbatch.jobs log {record.job_id} --follow\n"
        f"  state       python -m rlbatch.jobs show {record.job_id}\n"
        f"  cancel      python -m rlbatch.jobs cancel {record.job_id}",
        flush=True,
    )


def _start_mpi(config: Config, registry: Registry, program: Program) -> int:
    mpi = find_mpi()
    hosts = mpi_hosts(config, registry)  # refused before there is a run folder
    with program.prepared(config, registry) as (config, run_dir):
        job = mpi_job(config, hosts, run_dir, mpi, rank_command(config, run_dir, program.module))
    with run_folder_lock(run_dir), as_config_errors(run_dir):
        fall_back_to(rank_log(run_dir, 0))
        new_record(process_id(), "mpi", job_name(config), run_dir, "")
        print(f"Run folder: {run_dir}", flush=True)
        return _settled(run_dir, run_mpi(job, config, run_dir))


def _settled(run_dir: Path, code: int) -> int:
    """The exit code of a run, whose summary says how it ended also where rank 0 could not."""
    if code:
        error = read_first_error(run_dir)
        record_end(run_dir, "failed" if error or code == FAILED else "interrupted", asdict(error) if error else None)
    return code


def _start_nothing(config: Config, registry: Registry, program: Program) -> int:
    _check_allocation(config, registry)
    with program.prepared(config, registry) as (config, run_dir):
        (run_dir / LOGS).mkdir(exist_ok=True)
    job_id = current_job_name()
    if job_id:
        new_record(job_id, "sbatch", job_name(config), run_dir, job_state(job_id).log)
    srun = ["srun", *SRUN, *srun_options(config.cluster, run_dir), *rank_command(config, run_dir, program.module)]
    print(f"Run folder: {run_dir}\nEach rank runs: {shlex.join(srun)}", flush=True)
    return 0


def _check_allocation(config: Config, registry: Registry) -> None:
    """Checks a batch script's allocation: as many tasks as ranks, on as many nodes as they fill."""
    where, ranks = place_ranks(config, registry), config.layout.world_size
    for name, wanted in (("SLURM_NTASKS", ranks), ("SLURM_JOB_NUM_NODES", where.nodes)):
        found = os.environ.get(name, "")
        if found.isdecimal() and int(found) != wanted:
            raise ConfigError(
                f"layout.world_size={ranks}: needs {where.nodes} nodes x {where.ranks_per_node} tasks, this allocation has {name}={found}. "
                f"Use --nodes={where.nodes} --ntasks-per-node={where.ranks_per_node}, or another layout."
            )
