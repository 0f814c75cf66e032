"""The layouts that ``tests.gpu.compare`` runs."""

from __future__ import annotations

from dataclasses import replace

from rlbatch.config.schema import LayoutConfig

ONE = LayoutConfig(world_size=1)
LAYOUTS = {
    "1 GPU": ONE,
    "1 GPU recompute": replace(ONE, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
    "DP2": LayoutConfig(world_size=2),
    "EP2": LayoutConfig(world_size=2, ep_size=2),
    "PP2": LayoutConfig(world_size=2, pp_size=2),
    "TP2 ETP2": LayoutConfig(world_size=2, tp_size=2, etp_size=2),
    "TP2 EP2": LayoutConfig(world_size=2, tp_size=2, ep_size=2),
    "TP2": LayoutConfig(world_size=2, tp_size=2),
    "CP2": LayoutConfig(world_size=2, cp_size=2),
    "TP2 CP2 EP2": LayoutConfig(world_size=4, tp_size=2, cp_size=2, ep_size=2),
    "PP2 EP2": LayoutConfig(world_size=4, pp_size=2, ep_size=2),
}
