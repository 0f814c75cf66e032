"""Memory beside its plan: what summary.json shows, and what is said where a GPU has none left."""

from __future__ import annotations

import pytest

from rlbatch.plan.accounting import LEFT_GPU, OTHERS, PROCESSES, TENSORS, host_plans, out_of_host_memory, out_of_memory, planned_memory
from rlbatch.plan.engine_memory import GIB
from rlbatch.plan.memory import GRADIENT_BYTES
from tests.plan.planned import REGISTRY, nodes, plan

QWEN = ("+cluster=h100x8", "layout.world_size=8", "train.max_tokens_per_gpu=65536")


def taken(phase: str, **more: float) -> dict[str, float]:
    """What a rank of the job takes in a phase, as its plan says, with so many GiB more of some."""
    parts = plan(*QWEN).memory.expected.stages[0].gpu[phase]
    engine = sum(size for name, size in parts.items() if name.startswith(("engine's", "CUDA")))
    known = {name: parts.get(name, 0.0) for name in ("weights", "gradients", "fragmentation")}
    state = parts["main weights"] + parts["moments"]
    rest = sum(parts.values()) - engine - state - sum(known.values())
    found = {**known, "optimizer state": state, TENSORS: rest, OTHERS: engine}
    return {name: size + more.get(name.split()[0].rstrip(","), 0.0) * GIB for name, size in found.items()}


def test_a_phase_of_the_step_beside_its_plan() -> None:
    """The whole GPU, the trainer's tensors in it, and the node; what is certainly held is never more than what is expected."""
    job = plan(*QWEN)
    table = planned_memory(job.memory, nodes(job.job), on_gpu=True)
    assert list(table) == ["sync", "rollout", "logprobs", "update"]
    for rows in table.values():
        assert list(rows) == ["gpu", "trainer", "node"]
        assert all(0 < row["at_least"] <= row["planned"] for row in rows.values())
        assert rows["trainer"]["planned"] < rows["gpu"]["planned"]
    update = table["update"]
    assert update["trainer"]["at_least"] == update["gpu"]["at_least"]  # the engine sleeps
    gradients = GRADIENT_BYTES * job.model.shares(job.job.config.layout)[0].held / GIB
    assert update["trainer"]["at_least"] - table["logprobs"]["trainer"]["at_least"] >= gradients - 1e-6
    assert list(planned_memory(job.memory, nodes(job.job), on_gpu=False)["sync"]) == ["node"]


def test_what_outgrew_its_plan_is_named() -> None:
    """With both numbers of every component, and the one key with which the phase takes at least so much less than was asked for."""
    job = plan(*QWEN)
    said = out_of_memory(
        job, REGISTRY, 5, "update", taken("update", activations=9.0, fragmentation=1.0), "CUDA out of memory. Tried to allocate 2.00 GiB."
    )
    assert said.startswith("layout.world_size=8: rank 5's GPU has no memory left in updates: activations and other tensors took +9.0 GiB")
    assert ", and asked for 2.00 GiB more. GiB taken (planned): " in said
    change = said.rpartition(". Use ")[2].rstrip(".").split()
    assert len({key.partition("=")[0].partition(".options")[0] for key in change if not key.startswith("layout.recompute")}) <= 1
    before, after = (each.memory.gpu_of_stage(0, "update")[0].gib for each in (job, plan(*QWEN, *change)))
    assert after < before - 2


def test_who_holds_most_is_named() -> None:
    """Beside the plan's components, and before what to change."""
    owners = [("megatron/core/mlp.py:140 forward", 9 * GIB), ("mine.py:7 loss", GIB // 2)]
    said = out_of_memory(plan(*QWEN), REGISTRY, 0, "update", taken("update", activations=9.0), "Tried to allocate 2.00 GiB", owners)
    assert "). Of torch's, GiB: megatron/core/mlp.py:140 forward 9.0, mine.py:7 loss 0.5. Use " in said


def test_another_process_may_be_the_one() -> None:
    """Of an engine that sleeps badly; in a phase that has no tag of its own; without a number in torch's message."""
    said = out_of_memory(plan(*QWEN), REGISTRY, 0, "exchange", taken("log-probs", engine=30.0), "CUDA error: out of memory")
    assert f"no memory left for log-probs: {OTHERS} took +30.0 GiB beside what was planned. GiB taken" in said


def test_what_nothing_mends() -> None:
    """With every key at its least, only another layout is left."""
    least = "offload=cpu_adam offload.options.weights=true train.max_tokens_per_gpu=1 layout.recompute_granularity=full".split()
    said = out_of_memory(plan(*QWEN[:2], *least), REGISTRY, 0, "update", {}, "Tried to allocate 60.00 GiB")
    assert said.endswith("Use sizes that divide the model further, or more GPUs (layout.world_size).")


def test_a_host_without_memory() -> None:
    """Which component outgrew its plan, and the key with which the node takes less; without a plan, nothing is said of one."""
    job = plan(*QWEN, "offload=optimizer_state", "offload.options.weights=true", "algorithm.kl_loss=true")
    plans = host_plans(job, REGISTRY, 5)
    planned = plans["update"]["planned"]
    assert planned[LEFT_GPU] > planned["reference model"] > planned[PROCESSES] == 4 * GIB
    held = {LEFT_GPU: planned[LEFT_GPU], "reference model": planned["reference model"]}
    told = {"host_plans": plans, "phase": "training", "doing": "update", "held": held}
    said = out_of_host_memory(told, int(sum(held.values()) + 9 * GIB), 3 * GIB, on_gpu=True)
    assert said.startswith(
        f"in updates: {PROCESSES} took +8.0 GiB beside what was planned. GiB of the rank and what it started (planned): "
    )
    assert f"(planned): {LEFT_GPU} " in said
    change = said.rpartition(". Use ")[2].partition(",")[0].split()
    before, after = (each.memory.host(each.nodes, "update")[0].gib for each in (job, plan(*QWEN, *change)))
    assert after < before
    assert out_of_host_memory(told | {"phase": "checkpoint"}, 2**30, 0, on_gpu=True).startswith(
        "while a checkpoint is saved: nothing outgrew what was planned, "
    )
    without = {name: value for name, value in told.items() if name != "host_plans"}  # of a plugin that cannot be planned with
    assert out_of_host_memory(without, 2**30, 0, on_gpu=True) == ""


def test_memory_that_is_made_in_a_phase() -> None:
    """A host that is too small for what was planned: moments that the first update makes did not outgrow anything."""
    plans = host_plans(plan(*QWEN, "offload=cpu_adam"), REGISTRY, 0)
    planned = plans["update"]["planned"]
    told = {"host_plans": plans, "phase": "training", "doing": "update", "held": {"optimizer state": planned["optimizer state"] / 4}}
    most = int(planned["optimizer state"] + planned[PROCESSES] - 10 * GIB)
    said = out_of_host_memory(told, most, 0, on_gpu=True)
    state, all_of_it = planned["optimizer state"] / GIB, sum(planned.values()) / GIB
    assert said.startswith(f"in updates: nothing outgrew what was planned, {all_of_it:.1f} GiB in all. GiB of the rank")
    assert f"optimizer state {state - 10:.1f} ({state:.1f}), {PROCESSES} 4.0 (4.0)." in said
    leak = out_of_host_memory(told, most + 15 * GIB, 0, on_gpu=True)
    assert leak.startswith(f"in updates: {PROCESSES} took +5.0 GiB beside what was planned.")
    loading = out_of_host_memory({**told, "doing": "load", "held": {}}, int(2 * planned[PROCESSES]), 0, on_gpu=True)
    assert loading.startswith("while the model is loaded: nothing outgrew what was planned")


@pytest.mark.parametrize(("on_gpu", "planned"), [(False, "0.2"), (True, "2.0")])
def test_a_host_without_memory_for_the_imports(on_gpu: bool, planned: str) -> None:
    """A rank that has no plan yet is a process, of which it is known what it takes."""
    said = out_of_host_memory({"phase": "start"}, 9 * GIB // 4, GIB // 2, on_gpu=on_gpu)
    assert said.startswith(f"while it imports: {PROCESSES} took +{2.75 - (2 if on_gpu else 0.25):.1f} GiB beside what was planned. ")
    assert f"(planned): {PROCESSES} 2.8 ({planned}). Use more nodes or fewer ranks on each, or ask for more (--mem)." in said
