"""One rank of a job: ``python -m rlbatch.run --run-dir DIR``. The launchers start it; people start ``rlbatch.submit``."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import warnings
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from rlbatch.config.compose import load_config
from rlbatch.launch.environment import RankInfo
from rlbatch.launch.failures import StoppedBySignal, read_first_error, reporting_failures

CONFIG_FILE = "config.yaml"


def main() -> None:
    """Reads the run folder's config and runs this rank to the end."""
    parser = argparse.ArgumentParser(prog="python -m rlbatch.run", description="One rank of a job. Started by the launchers.")
    parser.add_argument("--run-dir", type=Path, required=True, help="Run folder with config.yaml, as made by rlbatch.submit.")
    run_rank(parser.parse_args().run_dir.resolve())


def run_rank(run_dir: Path) -> None:
    """Runs this process's rank to the end.

    Args:
        run_dir: Run folder, as made by rlbatch.submit.

    Raises:
        SystemExit: the job failed or was stopped.
    """
    signal.signal(signal.SIGTERM, _exit_on_signal)
    info = RankInfo.from_environment()
    info.init_method()  # refuses what is no rank of a job before its folder is touched
    _run_rank(run_dir, info)


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    raise StoppedBySignal(128 + number)


def _run_rank(run_dir: Path, info: RankInfo) -> None:
    _quiet_libraries()
    config = load_config(run_dir / CONFIG_FILE)
    from rlbatch.metrics.run_log import RunLog

    log = RunLog(run_dir, config.train.steps, info.rank)
    try:
        with reporting_failures(run_dir, info.rank):  # inside: the log's end tells of the error that it records
            log.phase("importing Megatron-core")
            from rlbatch.launch.job_store import open_store
            from rlbatch.launch.process_group import process_group
            from rlbatch.launch.watchdog import Watchdog
            from rlbatch.pipeline.assemble import assemble
            from rlbatch.pipeline.loop import run

            watchdog = Watchdog(config.launch)
            store = open_store(info, config.launch.rendezvous_timeout_s)
            with process_group(store, config.launch.collective_timeout_s) as device:
                with watchdog.phase("start"):
                    job = assemble(config, run_dir, device, store, watchdog, log.phase)
                try:
                    run(job, log)
                finally:
                    job.rollout.close()
    except SystemExit:  # another rank failed, or somebody stopped the job
        error = read_first_error(run_dir)
        log.finish("failed" if error else "interrupted", asdict(error) if error else None)
        raise
    log.finish("finished")


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
