"""One rank of a job: ``python -m rlbatch.run --run-dir DIR``. The launchers start it; people start ``rlbatch.submit``."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlbatch.api import ConfigError, RlbatchError, TrackerContext
from rlbatch.api.exit_codes import FAILED, REFUSED, STOPPED
from rlbatch.config.compose import CONFIG_FILE, load_config
from rlbatch.config.schema import Config
from rlbatch.config.structured import to_plain
from rlbatch.launch.membership.rendezvous import Meeting, join, launch_id
from rlbatch.launch.membership.watchdog import Watchdog
from rlbatch.launch.ranks.host_memory import check_addresses
from rlbatch.launch.ranks.interfaces import set_interface
from rlbatch.launch.ranks.rank_info import RankInfo
from rlbatch.launch.ranks.variables import set_allocator
from rlbatch.launch.records.failures import FirstError, StoppedBySignal, has_failed, mark_finished, read_first_error, reporting_failures
from rlbatch.launch.records.history import end_attempt
from rlbatch.launch.records.ownership import read_run_id
from rlbatch.launch.records.streams import redirect_output
from rlbatch.launch.shutdown import guardian
from rlbatch.launch.shutdown.guardian import RankFacts, guarded, report_death, report_remains
from rlbatch.launch.shutdown.requeue import go_on_later
from rlbatch.launch.shutdown.signals import Ending, StopNotice, find_ending, ignore_signals
from rlbatch.launch.slurm.scontrol import slurm_job_id
from rlbatch.metrics.report import record_end

if TYPE_CHECKING:
    from rlbatch.launch.membership.store import JobStore
    from rlbatch.launch.preflight.checks import Preflight
    from rlbatch.metrics.run_log import RunLog
    from rlbatch.pipeline.loop import EarlyEnd
    from rlbatch.registry import Registry

REQUEUE_S = 3.0
"""Seconds that a rank which was stopped while it started stays behind rank 0: srun ends the others when the first one fails."""


def main() -> None:
    """Reads the run folder's config and runs this rank to the end."""
    parser = argparse.ArgumentParser(prog="python -m rlbatch.run", description="One rank of a job. Started by the launchers.")
    parser.add_argument("--run-dir", type=Path, required=True, help="Run folder with config.yaml, as made by rlbatch.submit.")
    run_process(parser.parse_args().run_dir.resolve())


@dataclass(frozen=True)
class Joined:
    """A rank that has joined its job, whatever the job is.

    Attributes:
        config: The run folder's config.
        run_dir: The run folder.
        meeting: The meeting with the other ranks.
        watchdog: Ends this rank with its job.
        notice: Asks the job to stop.
        log: What rank 0 shows and writes.
    """

    config: Config
    run_dir: Path
    meeting: Meeting
    watchdog: Watchdog
    notice: StopNotice
    log: RunLog

    def connect(self) -> tuple[Registry, JobStore, Preflight]:
        """Loads the plugins, opens the job's store with all ranks, and checks the nodes; returns the three."""
        from rlbatch.launch.membership.store import open_store
        from rlbatch.launch.preflight.checks import Preflight
        from rlbatch.registry import load_plugins

        config, meeting, watchdog = self.config, self.meeting, self.watchdog
        registry = load_plugins(config.plugins)
        context = TrackerContext(self.run_dir, read_run_id(self.run_dir), self.run_dir.name, to_plain(config))
        self.log.track(registry.chosen_trackers(config), context)
        hosts = watchdog.wait_for_ranks()
        store = open_store(meeting.info, config.launch.rendezvous_timeout_s, hosts, meeting.store_socket, meeting.attempt.token)
        watchdog.seal_store()
        set_interface(meeting.interface, is_chosen=bool(config.cluster.interface))
        preflight = Preflight(config, self.run_dir, store, registry)
        preflight.check_nodes()
        return registry, store, preflight


def run_process(run_dir: Path, work: Callable[[Joined], EarlyEnd | None] | None = None) -> None:
    """Runs this process's rank as the last thing that the process does.

    Args:
        run_dir: The run folder.
        work: What a rank does once it has joined, ``reporting`` what goes wrong; None: it trains, or evaluates.

    Raises:
        SystemExit: the job was refused, has failed or was stopped.
    """
    try:
        run_rank(run_dir, work or _train)
    except RlbatchError as error:
        print(error, file=sys.stderr)
        sys.exit(REFUSED)
    finally:
        ignore_signals()


def run_rank(run_dir: Path, work: Callable[[Joined], EarlyEnd | None]) -> None:
    """Runs this process's rank to the end, in a run folder that rlbatch.submit made.

    Raises:
        RlbatchError: this process is no rank of that job, or its config cannot be read.
        SystemExit: the job failed or was stopped.
    """
    notice = StopNotice()
    notice.install()
    _quiet_libraries()
    info = RankInfo.from_environment()
    config = _config_of(run_dir, info)
    set_allocator(config.train.allocator)
    with guarded(notice, partial(_died, run_dir, info), partial(report_remains, info)):
        _run_guarded(config, run_dir, info, notice, work)


def _run_guarded(config: Config, run_dir: Path, info: RankInfo, notice: StopNotice, work: Callable[[Joined], EarlyEnd | None]) -> None:
    log: RunLog | None = None

    def stopped() -> None:
        error = read_first_error(run_dir) if has_failed(run_dir) else None
        if info.rank == 0 and error is None:
            mark_finished(run_dir)
        if log:
            log.finish("failed" if error else "interrupted", asdict(error) if error else None)
        if log and notice.is_set and error is None:  # nothing is to be saved yet, but the job may be queued again
            _go_on_later(run_dir, config, info, None, find_ending(notice.number, notice.time, info, config.launch.notice_s))

    def leave(number: int) -> None:
        try:
            watchdog.leave(signal.Signals(number).name)
            stopped()
        finally:
            guardian.end(FAILED if has_failed(run_dir) else 128 + number)

    try:
        with reporting_failures(run_dir, info.rank):
            redirect_output(run_dir, info.rank)
            check_addresses()
            meeting = join(info, run_dir, config, launch_id())
            guardian.tell(token=meeting.attempt.token)
            with Watchdog(config.launch, meeting, run_dir) as watchdog:
                log = _open_log(config, run_dir, meeting)
                watchdog.on_rank_0_lost = partial(_lost, run_dir)
                notice.end_start(leave)
                early = work(Joined(config, run_dir, meeting, watchdog, notice, log))
    except StoppedBySignal as signalled:
        ignore_signals()
        stopped()
        raise SystemExit(FAILED if has_failed(run_dir) else signalled.code) from None  # srun sends SIGTERM when one has failed
    except SystemExit:  # a rank failed
        error = read_first_error(run_dir)
        if log:
            log.finish("failed", asdict(error) if error else None)
        raise
    log.finish("interrupted" if early else "finished")
    if info.rank == 0:
        mark_finished(run_dir)
    if info.rank == 0 and not early:
        end_attempt(run_dir, info, _steps(config), "finished")
    if early and info.rank == 0:  # the others end with 0: Slurm would take another code for a failure, and end rank 0 before it is done
        _go_on_later(run_dir, config, info, early.step, early.ending)
        raise SystemExit(STOPPED)


def _lost(run_dir: Path, error: FirstError) -> None:
    record_end(run_dir, "failed", asdict(error))


def _died(run_dir: Path, info: RankInfo, how: str, told: RankFacts) -> None:
    error = report_death(run_dir, info, how, told)
    if error and info.rank == 0:  # which keeps the run's summary
        _lost(run_dir, error)


def _config_of(run_dir: Path, info: RankInfo) -> Config:
    config = load_config(run_dir / CONFIG_FILE)
    if info.world_size != config.layout.world_size:  # before the folder is touched: this may be no rank of its job
        raise ConfigError(f"layout.world_size={config.layout.world_size}: {info.world_size} ranks were started. Make both equal.")
    return replace(config, resume="auto") if info.restart_count else config  # a job that was queued again goes on


def _steps(config: Config) -> int:
    return config.train.steps if config.mode == "train" else 0


def _open_log(config: Config, run_dir: Path, meeting: Meeting) -> RunLog:
    from rlbatch.metrics.run_log import RunLog

    log = RunLog(run_dir, _steps(config), meeting.info.rank)
    if meeting.overseer:
        meeting.overseer.on_failure = lambda error: log.failed(asdict(error))
    return log


def _train(rank: Joined) -> EarlyEnd | None:
    config, watchdog, log = rank.config, rank.watchdog, rank.log
    with ExitStack() as stack, watchdog.reporting():
        with watchdog.phase("start"):
            log.phase("importing Megatron-core")
            gc.disable()  # looking again and again through half a million objects that stay takes a seventh of the imports' time
            from rlbatch.launch.membership.store import process_group
            from rlbatch.pipeline.assemble import assemble
            from rlbatch.pipeline.job import Job
            from rlbatch.pipeline.loop import evaluate_alone, run

            gc.freeze()
            gc.enable()
            registry, store, preflight = rank.connect()
            device = stack.enter_context(process_group(store, config.launch.collective_timeout_s))
            preflight.check_links(device)
            job = assemble(config, rank.run_dir, device, store, watchdog, log.phase, rank.notice, registry)
            stack.callback(job.rollout.close)
            stack.callback(job.scorer.close)
            gc.collect()
            gc.freeze()  # a rank that looks through all that stays would make the others wait in some step
            wait_for_all(watchdog, store, "start")  # loading may differ by more than a collective waits
        early = run(job, log) if isinstance(job, Job) else evaluate_alone(job, log)
        wait_for_all(watchdog, store, "end")
        return early


def wait_for_all(watchdog: Watchdog, store: JobStore, place: str) -> None:
    """Waits at a place of this name until all ranks are there."""
    with watchdog.waiting():
        store.barrier(place, watchdog.limit_s("start"))


def _go_on_later(run_dir: Path, config: Config, info: RankInfo, last_step: int | None, ending: Ending | None) -> None:
    """Lets the job go on later, on rank 0 as its last act; under Slurm other ranks wait for it to do so."""
    if info.rank and slurm_job_id(info):
        time.sleep(REQUEUE_S)
    elif info.rank == 0 and ending is not None:
        print(go_on_later(run_dir, config, info, last_step, ending), flush=True)


def _quiet_libraries() -> None:
    """Keeps the terminal for the run: missing optional kernels are no news on a machine without CUDA."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", module="megatron")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    logging.getLogger("megatron").setLevel(logging.ERROR)


if __name__ == "__main__":
    main()
