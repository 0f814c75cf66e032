"""Runs one rank of a comparison that is a job: ``python -m rlbatch.align.job.rank --run-dir DIR``. The launchers start it."""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlbatch import run
from rlbatch.align.job.submit import PAGE, TEXT, VERDICT, asked
from rlbatch.config.hf_config import read_config
from rlbatch.launch.records.disk import as_config_errors

if TYPE_CHECKING:
    from rlbatch.align.job.ranks import JobRanks
    from rlbatch.registry import Registry
    from rlbatch.run import Joined

SCRATCH = "values"
"""Name of the folder in the run folder that keeps the sides' values until they are compared."""


def main() -> None:
    """Reads the run folder and runs this rank to the end."""
    parser = argparse.ArgumentParser(
        prog="python -m rlbatch.align.job.rank", description="One rank of a comparison. Started by the launchers."
    )
    parser.add_argument("--run-dir", type=Path, required=True, help="Run folder, as made by rlbatch.align.")
    run_process(parser.parse_args().run_dir.resolve())


def run_process(run_dir: Path) -> None:
    """Runs this rank's part of the comparison in a run folder, as ``rlbatch.run.run_process`` does for training."""
    run.run_process(run_dir, _align)


def _align(rank: Joined) -> None:
    with rank.watchdog.reporting():
        with rank.watchdog.phase("start"):
            rank.log.phase("importing Megatron-core")
            from rlbatch.align.job.ranks import JobRanks
            from rlbatch.launch.membership.store import process_group

            registry, store, preflight = rank.connect()
            with process_group(store, rank.config.launch.collective_timeout_s) as device:
                preflight.check_links(device)
            ranks = JobRanks(store, rank.watchdog, rank.config.launch.collective_timeout_s)
        rank.log.begin(0)
        if store.info.rank:
            ranks.serve()
        else:
            _compare(rank, registry, ranks)
            ranks.close()
        run.wait_for_all(rank.watchdog, store, "end")


def _compare(rank: Joined, registry: Registry, ranks: JobRanks) -> None:
    from rlbatch.align.report.compare import report

    options, run_dir = asked(rank.run_dir), rank.run_dir
    options = replace(options, out=options.out or str(run_dir / PAGE))
    family = registry.resolve_model_family(read_config(Path(options.hf)))

    def say(text: str) -> None:
        print(text, flush=True)
        said.write(text + "\n")
        with rank.watchdog.phase("training"):
            said.flush()  # a sign of life: each side has the time of one phase

    scratch = run_dir / SCRATCH
    with as_config_errors(run_dir), (run_dir / TEXT).open("w", encoding="utf-8") as said:
        shutil.rmtree(scratch, ignore_errors=True)  # an attempt that was ended left it
        scratch.mkdir()
        agrees = report(options, family, ranks.run, registry, say, scratch)
        shutil.rmtree(scratch)
        (run_dir / VERDICT).write_text(json.dumps({"agrees": agrees}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
