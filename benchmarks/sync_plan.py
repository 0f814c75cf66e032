"""What a weight sync moves, without GPUs: ``python -m benchmarks.sync_plan [nodes=4] [model/layout ...]``.

All shipped layouts if none is named. The export of every rank of so many nodes, evenly spread over the job, runs on the meta device
(``benchmarks.sync_traffic.py``). A row has, in GB (1e9 bytes), of the GPU that has most: what comes to it over the network and within
its node, what it sends over the network, and the least that could come (what its engine keeps and its trainer has not); then how much
comes to the worst node, as a multiple of what its engines need and no rank of it has. Exits with 1 if that is above 1.5. Then the largest
buffers of a rank.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from benchmarks.sync_traffic import NETWORK, NODE, Engines, SyncTraffic, count_sync
from rlbatch.config.compose import compose
from rlbatch.config.sources import group_files
from rlbatch.plan.nodes import place_ranks
from rlbatch.registry import load_plugins
from tests.large_models import CONFIGS

GB, MIB = 1e9, 2**20
MOST = 1.5
MODELS = {"deepseek671b_128xh100": "deepseek_r1"}
"""Of layouts that are not named after theirs."""


def planned(model: str, layout: str, most: int) -> tuple[Engines, SyncTraffic, int]:
    """Engines, traffic and bytes of a bucket of a shipped job."""
    registry = load_plugins()
    config = compose([f"model={model}", f"layout={layout}", "model.hf=x", "data.train=x"])
    family = registry.resolve_model_family(CONFIGS["deepseek671b" if model == "deepseek_r1" else model])
    shape, gpus = registry.engine_shape(config), registry.ranks_per_engine(config)
    is_expert_parallel = bool(config.rollout.engine.get("enable_expert_parallel"))
    engines = Engines(gpus, shape.replica_gpus, is_expert_parallel, config.rollout.quantization == "fp8")
    plain = replace(config.layout, dispatcher="alltoall", deepep=False)  # DeepEP has no parameters
    where = place_ranks(config, registry)
    nodes = range(0, where.nodes, -(-where.nodes // most))
    return engines, count_sync(family, plain, engines, where.ranks_per_node, nodes), config.rollout.bucket_mib * MIB


def main(names: list[str]) -> int:
    """Prints a table."""
    layouts, most_nodes = sorted(group_files()["layout"]), next((int(name[6:]) for name in names if name.startswith("nodes=")), 4)
    jobs = [(name.partition("/")[0], name.partition("/")[2]) for name in names if "/" in name] or [
        (MODELS.get(name, name.rpartition("_")[0]), name) for name in layouts
    ]
    print(f"{'layout':24} {'engine':>6} {'network':>8} {'in node':>8} {'sent':>8} {'least':>8} {'all/least':>9} {'node':>6}  GB")
    worst, buffers = 0.0, list[str]()
    for model, layout in jobs:
        started = time.perf_counter()
        engines, traffic, bucket = planned(model, layout, most_nodes)
        most = max(traffic.ranks, key=lambda rank: rank.received.total())
        network, sent = (
            max(counts[NETWORK] for counts in ways) for ways in zip(*((r.received, r.sent) for r in traffic.ranks), strict=True)
        )
        nodes = [come / least for come, least in zip(traffic.node_received, traffic.node_least, strict=True) if least]
        worst = max([worst, *nodes])
        columns = (network, most.received[NODE], sent, most.least)
        print(
            f"{layout:24} {engines.gpus:6} {' '.join(f'{each / GB:8.2f}' for each in columns)} {most.received.total() / most.least:9.2f} "
            f"{max(nodes, default=0):6.3f}  {time.perf_counter() - started:.0f} s",
            flush=True,
        )
        name, size = traffic.largest
        held = {f"2 x a bucket, or of {name}": 2 * max(bucket, size), **most.buffers}
        buffers.append(f"{layout}: {', '.join(f'{what} {each / MIB:.0f} MiB' for what, each in held.items())}")
    print("\n".join(buffers))
    return int(worst > MOST)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
