"""Runs `run_local` with a stand-in for the ranks: `python job.py <run dir> <world size> <what the ranks do>`."""

from __future__ import annotations

import sys
from pathlib import Path

from rlbatch.config.machines import LaunchConfig
from rlbatch.config.schema import Config, LayoutConfig
from rlbatch.launch.starters.local import run_local

RANK = """
import contextlib, os, pathlib, signal, subprocess, sys, time
from rlbatch.api import ConfigError
from rlbatch.launch.ranks.rank_info import RankInfo
from rlbatch.launch.records.failures import reporting_failures
from rlbatch.launch.shutdown.guardian import guarded
from rlbatch.launch.shutdown.signals import StopNotice

run_dir, behaviour = pathlib.Path(sys.argv[1]), sys.argv[2].removeprefix("guarded_")
info = RankInfo.from_environment()
is_guarded = sys.argv[2] != behaviour  # as the ranks of a run are
guards = guarded(StopNotice(), lambda how, facts: None, lambda held: None) if is_guarded else contextlib.nullcontext()
with guards, reporting_failures(run_dir, info.rank):
    print(f"output of rank {info.rank}")
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGRTMIN, signal.SIG_IGN)
    if behaviour != "succeed":
        child = subprocess.Popen(["sleep", "600"])
        part = run_dir / f"part.{info.rank}"
        part.write_text(f"{os.getpid()} {child.pid}")
        part.replace(run_dir / f"pids.{info.rank}")  # whoever sees it reads it
    while behaviour != "succeed" and len(list(run_dir.glob("pids.*"))) < info.world_size:
        time.sleep(0.01)
    if info.rank == 1 and behaviour == "refuse":
        raise ConfigError("train.steps=x: cannot be right. Correct it.")
    if info.rank == 1 and behaviour == "raise":
        raise ValueError("unforeseen")
    if info.rank == 1 and behaviour == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if info.rank == 1 and behaviour == "exit":
        os._exit(7)
    if behaviour == "all_refuse":
        raise ConfigError(f"rank {info.rank} refuses")
    if info.rank == 0 and behaviour == "killed":
        # What a peer sees of it: a broken connection, at once.
        while os.path.exists(f"/proc/{(run_dir / 'pids.1').read_text().split()[0]}/fd/0"):
            time.sleep(0.01)
        raise RuntimeError("connection closed by peer")
    if behaviour != "succeed":
        time.sleep(600)
"""

if __name__ == "__main__":
    folder, world_size, what = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    config = Config(layout=LayoutConfig(world_size=world_size), launch=LaunchConfig(notice_s=1))
    sys.exit(run_local(config, folder, [sys.executable, "-c", RANK, str(folder), what]))
