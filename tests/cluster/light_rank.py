"""A rank that only joins its job, without torch, and tells what it knows: `python -m tests.cluster.light_rank RUN_DIR`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rlbatch.config.schema import Config
from rlbatch.launch.membership.rendezvous import join, launch_id
from rlbatch.launch.membership.watchdog import Watchdog
from rlbatch.launch.ranks.rank_info import RankInfo


def main(run_dir: Path) -> None:
    config, info = Config(), RankInfo.from_environment()
    meeting = join(info, run_dir, config, launch_id())
    with Watchdog(config.launch, meeting, run_dir) as watchdog:
        hosts = watchdog.wait_for_ranks()
    known = {
        "rank": info.rank,
        "world_size": info.world_size,
        "local_rank": info.local_rank,
        "node_rank": info.node_rank,
        "host": info.host,
        "hosts": hosts,
        "token": meeting.attempt.token,
        "torch": "torch" in sys.modules,
    }
    (run_dir / f"rank{info.rank}.json").write_text(json.dumps(known))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
