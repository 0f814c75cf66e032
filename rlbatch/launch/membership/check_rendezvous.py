"""Shows whether ranks find each other, without torch or a config: ``python -m rlbatch.launch.membership.check_rendezvous``, by srun.

Every rank reads its launcher's variables, meets the others as the ranks of a run do, and prints one line::

    rank 5 of 128: host n01, local rank 5 of 8, node 0: table 4f1c09d2

The number at the end is a checksum of all ranks' hosts in order: it is the same on every rank, or they do not agree. Rank 0 prints the
hosts with their ranks before. Exit code 0: all ranks came and agree. Any folder that all ranks see will do as run folder; it is left
with attempt.json in it. For tests: 128 tasks of it start in seconds on two cores.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import zlib
from pathlib import Path

from rlbatch.config.machines import ClusterConfig, LaunchConfig
from rlbatch.config.schema import Config
from rlbatch.launch.membership.rendezvous import join, launch_id
from rlbatch.launch.membership.watchdog import Watchdog
from rlbatch.launch.ranks.rank_info import RankInfo
from rlbatch.launch.records.failures import reporting_failures
from rlbatch.launch.records.streams import keep_output


def main() -> None:
    """Runs the command on this rank."""
    parser = argparse.ArgumentParser(
        prog="python -m rlbatch.launch.membership.check_rendezvous", description="Whether a launcher's ranks find each other."
    )
    parser.add_argument("--run-dir", type=Path, required=True, help="A folder that all ranks see.")
    parser.add_argument("--timeout", type=float, default=120.0, help="Seconds until all ranks must have come.")
    parser.add_argument("--interface", default="", help="Network interface between nodes; empty: the one that leads to the first node.")
    arguments = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    run_dir = arguments.run_dir.resolve()
    info = RankInfo.from_environment()
    config = Config(launch=LaunchConfig(rendezvous_timeout_s=arguments.timeout), cluster=ClusterConfig(interface=arguments.interface))
    with reporting_failures(run_dir, info.rank):
        meeting = join(info, run_dir, config, launch_id())
        with Watchdog(config.launch, meeting, run_dir) as watchdog:
            hosts = watchdog.wait_for_ranks()
            if info.rank == 0:
                print("\n".join(_rows(hosts)), flush=True)
            node = "?" if info.node_rank is None else info.node_rank
            place = f"host {info.host}, local rank {info.local_rank} of {info.local_size}, node {node}"
            print(f"rank {info.rank} of {info.world_size}: {place}: table {zlib.crc32(' '.join(hosts).encode()):08x}", flush=True)


def _rows(hosts: tuple[str, ...]) -> list[str]:
    """A line such as ``n01: ranks 0-7`` for each run of ranks on the same host."""
    rows = []
    for host, group in itertools.groupby(enumerate(hosts), key=lambda entry: entry[1]):
        ranks = [rank for rank, _ in group]
        rows.append(f"{host}: ranks {ranks[0]}-{ranks[-1]}")
    return rows


if __name__ == "__main__":
    keep_output()
    main()
