"""Weights over a group of their own, to an engine on other devices."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlbatch.api import ConfigError, EngineLost, EngineShape, RolloutContext, WeightBucket
from rlbatch.config.compose import compose
from rlbatch.engines.backend.hosted import HostedOptions, devices_behind, uses_group
from rlbatch.engines.client.engine_process import EngineHost
from rlbatch.engines.transfer.sender import WeightSender
from rlbatch.engines.transfer.weight_group import SENDER, WeightGroup
from rlbatch.job_parts import placement
from rlbatch.plan.engine_plan import EnginePlan
from rlbatch.plan.nodes import Placement
from rlbatch.registry import load_plugins
from tests.hosted_plugin import hosted
from tests.leftovers import shared_by
from tests.stopwatch import Stopwatch

REGISTRY = load_plugins()

LIMIT_S = 60.0


def joined(host: EngineHost, folder: Path) -> WeightSender:
    call = host.begin("join", {"path": str(folder / "join"), "size": 2, "limit_s": LIMIT_S})
    group = WeightGroup(folder / "join", SENDER, 2, "cpu", LIMIT_S)
    call.result(LIMIT_S)
    return WeightSender(host, "cpu", lambda content: [content], LIMIT_S, group=group, is_collective=True)


def buckets(scale: float) -> list[WeightBucket]:
    return [WeightBucket([str(i)], [torch.full((size,), scale + i)], 5) for i, size in enumerate([1000, 10, 200_000, 3, 200_001])]


def test_an_engine_gets_every_tensor(host: EngineHost, tmp_path: Path) -> None:
    """In two syncs, in buckets that grow; no memory is shared, and the group leaves nothing behind."""
    before = shared_by(os.getpid())
    sender = joined(host, tmp_path)
    for scale in (1.0, 2.0):
        assert sender.send(buckets(scale)) == 5
        assert host.call("sums", limit_s=LIMIT_S)["sums"] == [
            pytest.approx(float(tensor.sum())) for bucket in buckets(scale) for tensor in bucket.tensors
        ]
        assert shared_by(os.getpid()) == before
        assert shared_by(host.pid) == set()
    sender.close()


def test_an_engine_that_dies_keeps_nobody_waiting(host: EngineHost, tmp_path: Path) -> None:
    """Killed between the group's start and a sync: the sync ends with the loss, long before the limit of a broadcast."""
    sender = joined(host, tmp_path)
    os.kill(host.pid, signal.SIGKILL)
    watch = Stopwatch()
    with pytest.raises(EngineLost, match="SIGKILL"):
        sender.send(buckets(1.0))
    sender.close()
    watch.assert_within(LIMIT_S / 2)


def test_members_that_have_met_keep_their_file(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file through which a rank and its engine met is there as long as they may look into it; each group has one of its own."""
    monkeypatch.setenv("PYTHONPATH", str(repository))
    made = hosted(RolloutContext(Path(), "cpu", "float32", folder=tmp_path / "0"), HostedOptions(transport="collective"))
    try:
        assert len(list((tmp_path / "0").glob("join*"))) == 1
        first = next((tmp_path / "0").glob("join*"))
        made.close()
        made.restart()
        assert [path for path in (tmp_path / "0").glob("join*") if path != first]
    finally:
        made.close()


@pytest.mark.parametrize("deed", ["SIGKILL", "SIGSTOP"])
def test_an_engine_that_is_lost_while_it_joins(deed: str, tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for its workers until the limit of a start."""
    monkeypatch.setenv("PYTHONPATH", str(repository))
    monkeypatch.setenv("RLBATCH_TEST_FAULTS", json.dumps([["0", "join", 1, deed]]))
    watch = Stopwatch()
    with pytest.raises(EngineLost):
        hosted(RolloutContext(Path(), "cpu", "float32", folder=tmp_path / "0"), HostedOptions(transport="collective", hang_limit_s=2.0))
    watch.assert_within(30)


def test_nobody_waits_forever_for_others(tmp_path: Path) -> None:
    """A member that does not come is an error after the limit."""
    watch = Stopwatch()
    with pytest.raises(RuntimeError):
        WeightGroup(tmp_path / "join", SENDER, 2, "cpu", 1.0)
    watch.assert_within(30)


def test_transport_that_cannot_be() -> None:
    """The error names the key and what would do."""
    with pytest.raises(ConfigError, match=r"rollout\.options\.transport=shared: an engine on GPUs of its own"):
        uses_group(HostedOptions(separate_gpus=2, transport="shared"))


def test_the_transport_follows_from_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared memory on the ranks' GPUs, a group to the GPUs behind them; too few GPUs are counted."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert not uses_group(HostedOptions())
    assert devices_behind(["cuda:1"], HostedOptions()) == ["cuda:1"]
    separate = HostedOptions(separate_gpus=2, gpus_per_engine=2)
    assert uses_group(separate)
    assert devices_behind(["cuda:0", "cuda:1"], separate) == ["cuda:2", "cuda:3"]
    with pytest.raises(ConfigError, match=r"separate_gpus=3: this node needs 5 GPUs, .* and has 4"):
        devices_behind(["cuda:1"], replace(separate, separate_gpus=3))
    assert uses_group(HostedOptions(transport="collective"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["layout.world_size=2", "layout.ep_size=2"], r"separate_gpus=4: must be as many as the ranks of a node \(2\)"),
        (["launcher=slurm", "layout.world_size=2", "layout.ep_size=2"], r"world_size=2: must be a multiple of \S+separate_gpus \(4\)"),
        (["launcher=slurm", "+cluster.gpus_per_node=6"], r"separate_gpus=4: as many of a node's GPUs have ranks, and a node has 6 \("),
    ],
)
def test_submit_refuses_gpus_that_are_not_there(overrides: list[str], message: str) -> None:
    """As many as the ranks of a node, which has that many twice."""
    config = compose(["rollout=vllm", "+rollout.options.separate_gpus=4", *overrides])
    with pytest.raises(ConfigError, match=message):
        EnginePlan(config, REGISTRY, 1, EngineShape(separate_gpus=4), placement(config, REGISTRY)).check_separate_gpus()


def test_hosts_of_engines_on_gpus_of_their_own(tmp_path: Path) -> None:
    """Under mpirun a bare host takes as many ranks as it has GPUs for engines; hosts that differ are refused."""
    (tmp_path / "hosts").write_text("n1\nn2\n")
    (tmp_path / "unlike").write_text("n1 slots=3\nn2 slots=1\n")
    job = ["rollout=vllm", "launcher=mpi", "layout.world_size=4", "layout.ep_size=4", "+rollout.options.separate_gpus=2"]
    config = compose([*job, f"cluster.hostfile={tmp_path / 'hosts'}"])
    shape = EngineShape(separate_gpus=2)
    assert placement(config, REGISTRY) == Placement(2, 2)
    EnginePlan(config, REGISTRY, 1, shape, placement(config, REGISTRY)).check_separate_gpus()
    config = compose([*job, f"cluster.hostfile={tmp_path / 'unlike'}"])
    with pytest.raises(ConfigError, match=r"separate_gpus=2: each host must take as many ranks.* Write `slots=2` behind each"):
        EnginePlan(config, REGISTRY, 1, shape, placement(config, REGISTRY)).check_separate_gpus()
