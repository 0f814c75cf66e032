"""Process start to the first barrier, ours against torchrun: ``python benchmarks/bootstrap.py [--ranks 8] [--rounds 5]``.

Each round starts both launchers on this machine, one after the other, in an order that changes from round to round, and takes the time
from the start of the launcher's process until the last rank has passed a gloo barrier. Our ranks do what those of a run do up to there
(config, rendezvous, watchdog, store, process group); torchrun's import torch, initialise gloo and pass the barrier. Exit code 1: ours
has the larger median.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

OURS, TORCHRUN = "rlbatch", "torchrun"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8, help="Ranks of each job.")
    parser.add_argument("--rounds", type=int, default=5, help="Jobs of each launcher.")
    parser.add_argument("--launch", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", choices=[OURS, TORCHRUN], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.launch:
        return launch(arguments.launch, arguments.ranks)
    if arguments.rank:
        (our_rank if arguments.rank == OURS else torchrun_rank)(arguments.folder)
        return 0
    return compare(arguments.ranks, arguments.rounds)


def compare(ranks: int, rounds: int) -> int:
    seconds: dict[str, list[float]] = {OURS: [], TORCHRUN: []}
    for turn in range(rounds):
        for name in (OURS, TORCHRUN) if turn % 2 == 0 else (TORCHRUN, OURS):
            seconds[name].append(measure(name, ranks))
        print(f"round {turn + 1}: " + ", ".join(f"{name} {values[-1]:.2f} s" for name, values in seconds.items()), flush=True)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    print(
        f"median of {rounds}, {ranks} ranks, {os.cpu_count()} cores: "
        + ", ".join(f"{name} {value:.2f} s" for name, value in medians.items())
    )
    return int(medians[OURS] > medians[TORCHRUN])


def measure(name: str, ranks: int) -> float:
    """Seconds from the start of the launcher until all ranks have passed the barrier."""
    with tempfile.TemporaryDirectory() as folder:
        ours = [sys.executable, __file__, "--launch", folder, "--ranks", str(ranks)]
        theirs = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
            *rank_command(TORCHRUN, folder),
        ]
        started = time.time()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        subprocess.run(ours if name == OURS else theirs, env=environment, check=True, stdout=subprocess.DEVNULL)
        passed = [float(path.read_text()) for path in Path(folder).glob("passed.*")]
    if len(passed) != ranks:
        raise RuntimeError(f"{name}: {len(passed)} of {ranks} ranks passed the barrier")
    return max(passed) - started


def rank_command(name: str, folder: str) -> Sequence[str]:
    return [__file__, "--rank", name, "--folder", folder]


def launch(folder: Path, ranks: int) -> int:
    """What ``rlbatch.submit`` does once a job is checked."""
    from rlbatch.config.compose import save_config
    from rlbatch.config.schema import Config, LayoutConfig
    from rlbatch.launch.starters.local import run_local

    config = Config(layout=LayoutConfig(world_size=ranks))
    save_config(config, folder / "config.yaml")
    return run_local(config, folder, [sys.executable, *rank_command(OURS, str(folder))])


def our_rank(folder: Path) -> None:
    """What ``rlbatch.run`` does before it builds the model, without preflight."""
    from rlbatch.config.compose import load_config
    from rlbatch.launch.membership.rendezvous import join, launch_id
    from rlbatch.launch.membership.watchdog import Watchdog
    from rlbatch.launch.ranks.interfaces import set_interface
    from rlbatch.launch.ranks.rank_info import RankInfo
    from rlbatch.launch.records.failures import reporting_failures
    from rlbatch.launch.shutdown.guardian import guarded
    from rlbatch.launch.shutdown.signals import StopNotice

    config = load_config(folder / "config.yaml")
    info = RankInfo.from_environment()
    with guarded(StopNotice(), lambda how, told: None, lambda held: None), reporting_failures(folder, info.rank):
        meeting = join(info, folder, config, launch_id())
        with Watchdog(config.launch, meeting, folder) as watchdog, watchdog.phase("start"):
            from rlbatch.launch.membership.store import open_store, process_group

            hosts = watchdog.wait_for_ranks()
            store = open_store(meeting.info, config.launch.rendezvous_timeout_s, hosts, meeting.store_socket, meeting.attempt.token)
            watchdog.seal_store()
            set_interface(meeting.interface, is_chosen=False)
            with process_group(store, config.launch.collective_timeout_s):
                pass_barrier(folder, info.rank)


def torchrun_rank(folder: Path) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    pass_barrier(folder, dist.get_rank())
    dist.destroy_process_group()


def pass_barrier(folder: Path, rank: int) -> None:
    import torch.distributed as dist

    dist.barrier()
    (folder / f"passed.{rank}").write_text(str(time.time()))


if __name__ == "__main__":
    sys.exit(main())
