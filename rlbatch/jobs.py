"""The command ``python -m rlbatch.jobs``: the jobs that were started from here, their state and first error, their log; cancels them."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rlbatch.api import ConfigError, RlbatchError
from rlbatch.api.exit_codes import REFUSED
from rlbatch.config.bounded_files import read_own
from rlbatch.launch.jobs import JobRecord, find_job, follow, read_jobs
from rlbatch.launch.records.failures import read_first_error
from rlbatch.launch.records.streams import end_with_reader, exit_code_of_display, keep_output
from rlbatch.launch.slurm.queue import JobState

LISTED = 20
ERROR_COLUMNS = 100


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code, of ``log --follow`` that of the job."""
    end_with_reader()
    parsed = _parser().parse_args(arguments)
    try:
        if parsed.command == "cancel":
            find_job(parsed.job).cancel()
            print(f"job {parsed.job}: asked to end")
            return 0
        if parsed.command == "log":
            return _log(find_job(parsed.job), parsed.follow)
        print("\n".join(_shown(find_job(parsed.job)) if parsed.command == "show" else _listed(parsed.all)))
    except RlbatchError as error:
        print(error, file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:  # of --follow: the job goes on
        return 128 + signal.SIGINT
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rlbatch.jobs", description="Jobs that were started from here, by Slurm or mpirun.")
    parser.set_defaults(command="list", all=False)
    commands = parser.add_subparsers(dest="command", metavar="list | show | log | cancel")
    listing = commands.add_parser("list", help=f"the newest {LISTED} jobs, with state and first error (the default)")
    listing.add_argument("--all", action="store_true", help="all of them")
    for name, words in (("show", "one job: state, progress, first error"), ("log", "its merged log"), ("cancel", "end it")):
        command = commands.add_parser(name, help=words)
        command.add_argument("job", help="job id, or run folder")
        if name == "log":
            command.add_argument("--follow", action="store_true", help="until the job ends; then its exit code")
    return parser


def _listed(everything: bool) -> list[str]:
    records = read_jobs() if everything else read_jobs()[-LISTED:]
    if not records:
        return ["No jobs were started from here."]
    rows = [("JOB", "NAME", "STATE", "SUBMITTED", "NODES", "RUN FOLDER", "FIRST ERROR")]
    for record in records:
        state = record.state()
        error = read_first_error(Path(record.run_dir))
        words = " ".join(str(error).split())[:ERROR_COLUMNS] if error else ""
        rows.append((record.job_id, record.name, _state(state), _time(record.submitted), state.nodes or "-", record.run_dir, words))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _shown(record: JobRecord) -> list[str]:
    state, run_dir = record.state(), Path(record.run_dir)
    why = f" ({state.reason})" if state.reason and state.state != "PENDING" else ""
    lines = [
        f"job         {record.job_id} ({record.name}), launcher {record.launcher}, from {record.host} at {_time(record.submitted)}",
        f"state       {_state(state)}{f' on {state.nodes}' if state.nodes else ''}{why}",
        f"run folder  {run_dir}",
        f"log         {record.log or 'the output of whoever started it'}",
    ]
    if state.restarts:
        lines.append(f"requeued    {state.restarts} x")
    if state.exit_code is not None:
        lines.append(f"exit code   {state.exit_code}")
    with suppress(OSError, ValueError):
        summary = read_own(run_dir / "summary.json")
        if summary.get("status") == "running" and state.exit_code is not None:
            summary["status"] = "ended without a word"  # all its processes were killed
        lines.append(f"progress    {', '.join(f'{key} {value}' for key, value in summary.items() if isinstance(value, (int, str)))}")
    error = read_first_error(run_dir)
    return [*lines, f"first error {error}"] if error else lines


def _log(record: JobRecord, until_end: bool) -> int:
    if not record.log:
        raise ConfigError(f"job {record.job_id}: whoever started it has its output; other ranks' are in {record.run_dir}/logs.")
    if until_end:
        return follow(record)
    try:
        print(Path(record.log).read_text(encoding="utf-8", errors="replace"), end="")
    except OSError as error:
        raise ConfigError(f"{record.log}: cannot be read ({error.strerror}), the job is {record.state().state}. Try again later.") from None
    return 0


def _state(state: JobState) -> str:
    """Shows a state with the exit code of a failed job, and why a waiting one waits."""
    detail = str(state.exit_code) if state.exit_code else state.reason if state.state == "PENDING" else ""
    return f"{state.state} ({detail})" if detail else state.state


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


if __name__ == "__main__":
    keep_output()
    sys.exit(exit_code_of_display(main(sys.argv[1:])))
