"""The run folder before ranks start: which one it is, whether this run may have it, and that nothing is left of one that was refused.

Imports no torch.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlbatch.api import ConfigError, RlbatchError
from rlbatch.config.schema import Config
from rlbatch.launch.jobs import read_record
from rlbatch.launch.records.disk import as_config_errors
from rlbatch.launch.records.ownership import ensure_run_id, is_run_folder, run_folder_lock
from rlbatch.launch.slurm.scontrol import current_job_name
from rlbatch.metrics.report import has_steps, record_end

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def run_dir_path(config: Config) -> Path:
    """``run_dir``, or a new name in ``runs/``."""
    if config.run_dir:
        return Path(config.run_dir)
    name, runs = time.strftime("%Y%m%d-%H%M%S"), Path("runs")
    return next(path for number in range(1, 1000) if not (path := runs / (name if number == 1 else f"{name}-{number}")).exists())


def check_run_dir(path: Path, config: Config) -> None:
    """Refuses, with ConfigError, a folder that this run may not have. One in which no step was ever trained is as good as new."""
    said = f"run_dir={config.run_dir}"
    if not os.path.exists(path):  # what one may not look at neither
        return
    if not path.is_dir():
        raise ConfigError(f"{said}: must be a folder, is a file. Choose another.")
    try:
        entries, about = len(list(path.iterdir())), path.stat()
    except OSError as error:
        raise ConfigError(f"{said}: cannot be read ({error.strerror}). Choose another.") from error
    if os.getuid() not in (0, about.st_uid):
        raise ConfigError(
            f"{said}: belongs to user id {about.st_uid}, you are {os.getuid()}, and its owner decides what ranks read there. "
            "Choose a folder of your own."
        )
    if entries and about.st_mode & OTHERS_WRITE:
        raise ConfigError(
            f"{said}: others may write in it (mode {stat.S_IMODE(about.st_mode):04o}), and would decide what ranks read there. "
            "Choose a new or empty folder, or take that from them: chmod go-w."
        )
    if entries and not is_run_folder(path):
        raise ConfigError(f"{said}: must be new or empty, or a run's folder; has {entries} entries of something else. Choose another.")
    if entries and config.resume != "auto" and has_steps(path):
        raise ConfigError(
            f"{said}: must be new or empty, has {entries} entries, steps of a run among them. "
            "Choose another, or resume=auto to go on with that run."
        )
    refuse_running_job(path)


@contextmanager
def taken_run_dir(config: Config) -> Iterator[Path]:
    """Makes the run folder, with mode 0700, or takes one that is there, as it is, except that others may not write in it any more. If what
    is done in here is refused, all that was made is removed again.

    Raises:
        RlbatchError: what was refused; the folder, or that it cannot be written.
    """
    path = run_dir_path(config)
    check_run_dir(path, config)
    missing = [parent for parent in (path, *path.parents) if not os.path.exists(parent)]
    run_dir = _made(path) if missing else path.resolve()
    if not missing and (mode := stat.S_IMODE(run_dir.stat().st_mode)) & OTHERS_WRITE:  # an empty one, as of `mkdir` with umask 002
        run_dir.chmod(mode & ~OTHERS_WRITE)
        print(f"run_dir={run_dir}: others may no longer write in it (mode was {mode:04o}); ranks run what is there.", file=sys.stderr)
        check_run_dir(run_dir, config)  # it may not have stayed empty
    with run_folder_lock(run_dir):  # again for as long as the job runs, by who starts it
        before = set(run_dir.iterdir())
        try:
            with as_config_errors(run_dir):
                ensure_run_id(run_dir)
                if record_end(run_dir, "failed"):
                    print(f"run_dir={run_dir}: the last run in it ended without a word; summary.json says failed now.", file=sys.stderr)
                yield run_dir
        except (RlbatchError, OSError, KeyboardInterrupt):
            with suppress(OSError):
                _remove(set(run_dir.iterdir()) - before, missing)
            raise
    if (mode := stat.S_IMODE(run_dir.stat().st_mode)) & (stat.S_IRWXG | stat.S_IRWXO):
        print(f"run_dir={config.run_dir}: is left with mode {mode:04o}, which others may look into; new ones have 0700.", file=sys.stderr)


def _remove(entries: Iterable[Path], folders: Iterable[Path]) -> None:
    for entry in entries:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    for folder in folders:
        folder.rmdir()


def refuse_running_job(run_dir: Path) -> None:
    """Refuses, with ConfigError, a run folder whose batch job waits or runs; a job that was queued again may use its own."""
    record = read_record(run_dir)
    if record is None or not record.is_slurm or record.job_id == current_job_name():
        return
    state = record.state()
    if not state.ended:
        raise ConfigError(
            f"run_dir={run_dir}: job {record.job_id} is {state.state} in it. Wait for its end, "
            f"end it with `python -m rlbatch.jobs cancel {record.job_id}`, or choose another folder."
        )


def _made(path: Path) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
    except OSError as error:
        raise ConfigError(f"run_dir={path}: cannot be made ({error.strerror}). Choose another.") from error
    return path.resolve()
