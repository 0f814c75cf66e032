"""What a sync would move, counted on ranks that are simulated: nothing comes to a node twice, and no GPU gets much beyond what it needs."""

from __future__ import annotations

import pytest

from benchmarks.sync_traffic import NETWORK, NODE, Engines, count_sync
from rlbatch.api import ModelFamily
from rlbatch.config.schema import LayoutConfig
from rlbatch.registry import load_plugins
from tests.large_models import CONFIGS

LAYOUTS = {
    "tensor-parallel groups fill nodes": LayoutConfig(world_size=8, tp_size=4, pp_size=2, ep_size=4),
    "two replicas of a node": LayoutConfig(world_size=8, tp_size=2, pp_size=2, ep_size=4),
    "all of a node have the same": LayoutConfig(world_size=16, tp_size=1, pp_size=2, ep_size=8),
    "replicas on other nodes": LayoutConfig(world_size=16, tp_size=4, pp_size=2, ep_size=4),
    "experts over nodes": LayoutConfig(world_size=16, tp_size=4, pp_size=2, cp_size=2, ep_size=8),
}
PER_NODE = 4


SMALL = {
    "qwen3_30b": {"num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2},
    "deepseek671b": {
        "num_hidden_layers": 4,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
    },
}


@pytest.fixture(scope="module")
def families() -> dict[str, ModelFamily]:
    """Of the widths of real models, with few layers and experts."""
    return {name: load_plugins().resolve_model_family({**CONFIGS[name], **fewer}) for name, fewer in SMALL.items()}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("model", SMALL)
def test_nothing_comes_to_a_node_twice(model: str, name: str, families: dict[str, ModelFamily]) -> None:
    """Of all that its engine needs and no rank of it has; parts begin at multiples of 16 bytes."""
    layout, engines = LAYOUTS[name], Engines(8, 4, is_quantised=model == "deepseek671b")
    traffic = count_sync(families[model], layout, engines, PER_NODE)
    for come, least in zip(traffic.node_received, traffic.node_least, strict=True):
        assert least <= come <= 1.02 * least
    sent = [rank.sent.total() for rank in traffic.ranks]
    assert sum(sent) == sum(rank.received.total() for rank in traffic.ranks)
    assert max(sent) <= 1.5 * sum(sent) / len(sent)


def test_two_engines_of_a_node_want_the_same(families: dict[str, ModelFamily]) -> None:
    """An expert that no rank of the node has comes to one of them, which passes it on."""
    for layout in (LAYOUTS["two replicas of a node"], LayoutConfig(world_size=16, tp_size=2, pp_size=2, ep_size=4, etp_size=2)):
        traffic = count_sync(families["qwen3_30b"], layout, Engines(2, 2), PER_NODE)
        for come, least in zip(traffic.node_received, traffic.node_least, strict=True):
            assert least <= come <= 1.02 * least


def test_a_gpu_gets_its_experts_and_a_nodes_share_of_the_rest(families: dict[str, ModelFamily]) -> None:
    """Over the network each rank of a node fetches as much as every other; what is divided among them comes from within it."""
    traffic = count_sync(families["qwen3_30b"], LAYOUTS["all of a node have the same"], Engines(8, 4), PER_NODE)
    shares = [rank.received[NETWORK] for rank in traffic.ranks]
    assert max(shares) <= 1.02 * min(shares)
    assert all(rank.received[NODE] > 0 and rank.least > 0 for rank in traffic.ranks)
    assert traffic.largest[0] in ("model.embed_tokens.weight", "lm_head.weight")
    assert all("experts that come together" in rank.buffers for rank in traffic.ranks)


def test_where_nothing_is_divided_nothing_moves(families: dict[str, ModelFamily]) -> None:
    """One rank has all of it; engines without expert parallelism keep parts of every expert, which all come."""
    alone = count_sync(families["qwen3_30b"], LayoutConfig(world_size=2), Engines(2, 2), 2)
    assert [rank.received.total() for rank in alone.ranks] == [0, 0]
    apart = count_sync(families["qwen3_30b"], LayoutConfig(world_size=2, ep_size=2), Engines(2, 2, has_expert_parallelism=False), 2)
    assert all(rank.received.total() > rank.least > 0 for rank in apart.ranks)
