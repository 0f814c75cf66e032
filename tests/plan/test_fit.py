"""Jobs that cannot fit are refused at submit, phase by phase, with both numbers and a change with which they do."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from rlbatch.api import ConfigError
from rlbatch.config.schema import LayoutConfig
from rlbatch.plan.engine_memory import MemoryInputs
from rlbatch.plan.fit import check_fit, layouts
from rlbatch.prepare import find_problems
from rlbatch.registry import compose_job
from tests.large_models import write_model
from tests.plan.planned import REGISTRY, job, nodes

DEEPSEEK_ON_32 = (
    *("+cluster=h100x128", "model=deepseek671b", "layout.world_size=32", "layout.tp_size=8", "layout.pp_size=4", "layout.ep_size=8"),
    "layout.cp_size=1",
)


def refused(*job: str) -> str:
    """What is said of the job's memory; empty: nothing."""
    problems = map(str, find_problems(*compose_job([*job, "data.train=x"]))[0])
    return "\n".join(problem for problem in problems if "GiB" in problem)


def hint(said: str) -> list[str]:
    """The keys that a refusal advises."""
    found = re.search(r"\. Use (.*)\.$", said)
    assert found, said
    return found[1].split()


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MODEL_DIR for each of the large models."""
    for name in ("deepseek671b", "qwen3_235b", "qwen3_30b"):
        write_model(name, tmp_path / name)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("job", "words", "advised"),
    [
        (
            (*DEEPSEEK_ON_32, "model.hf=deepseek671b"),
            (
                "layout.world_size=32: a GPU needs at least 171.9 GiB while the model is loaded (gradients 86.6, weights 43.3, weights on "
                "their way into a buffer 42.0), 129.9 in updates, and has 79 (cluster.gpu_memory_gib); a node needs at least 2803.9 GiB "
                "in the weight sync (optimizer 2771.9, processes 32.0), 2803.9 while engines generate, 2803.9 for log-probs, "
                "and has 2000 (cluster.host_memory_gib). Use layout.world_size=",
            ),
            "layout.pp_size",
        ),
        (
            ("+cluster=h100x8", "model.hf=qwen3_30b", "offload=none"),
            ("rollout=vllm: an engine needs 14.2 GiB for weights and 0.2 GiB to cache one sample on each of its 4 GPUs, and has 7.5 ",),
            "offload=optimizer_state",
        ),
        (
            ("+cluster=h20x32", "model.hf=qwen3_235b", "offload=optimizer_state"),
            ("a GPU needs at least 125.2 GiB in updates (moments 55.6, main weights 27.8, gradients 27.8, weights 13.9), 97.4 ",),
            "offload=cpu_adam",
        ),
        (
            ("+cluster=h20x96", "model.hf=deepseek671b", "rollout.options.sleep_level=1", "cluster.host_memory_gib=1200"),
            ("a node needs at least 1255.3 GiB for log-probs (optimizer 1053.3, weights of sleeping engines 170.0, processes 32.0), ",),
            "rollout.options.sleep_level=2",
        ),
        (
            ("+cluster=h20x96", "model.hf=deepseek671b", "algorithm.kl_loss=true", "cluster.host_memory_gib=1200"),
            ("reference model 131.7",),
            "algorithm.kl_loss=false",
        ),
        (
            (
                "+cluster=h20x96",
                "model.hf=deepseek671b",
                "algorithm.kl_loss=true",
                "algorithm.kl_loss_coef=0.01",
                "cluster.host_memory_gib=1200",
            ),
            ("1216.9 GiB in the weight sync (optimizer 1053.3, reference model 131.7, processes 32.0)",),
            "layout.last_stage_layers=4",
        ),
        (
            ("+cluster=h20x32", "model.hf=qwen3_235b", "rollout.options.sleep_level=0"),
            ("a GPU needs at least 108.2 GiB in updates (engine's cache 38.2, engine's weights 28.3, gradients 27.8, weights 13.9)",),
            "rollout.options.sleep_level=2",
        ),
    ],
    ids=["too few GPUs", "engine", "update", "sleep", "measured KL", "KL", "awake"],
)
def test_what_cannot_fit(models: None, job: tuple[str, ...], words: tuple[str, ...], advised: str) -> None:
    """Every part that is held has its name and size; with the advice the job is accepted."""
    said = refused(*job)
    for each in words:
        assert each in said
    assert any(key.startswith(advised) for key in hint(said))
    assert refused(*job, *hint(said)) == ""


def test_layouts_first_then_engines() -> None:
    """Where an engine is too large whatever the trainer does, a layout in which the trainer fits is named, and then an engine that does."""
    keys, advised = ["+cluster=h20x64", "model=qwen3_235b", "layout.tp_size=4", "layout.pp_size=1", "layout.ep_size=2", "offload=none"], []
    keys += ["layout.first_stage_layers=null", "layout.last_stage_layers=null", "rollout.options.gpus_per_engine=1"]
    keys += ["rollout.engine.data_parallel_size=1", "rollout.engine.enable_expert_parallel=false"]
    while said := _short_of_memory(job(*keys)):
        advised.append(hint(said))
        keys += advised[-1]
    layout, engine = advised
    assert layout == ["layout.pp_size=16", "layout.first_stage_layers=5", "layout.last_stage_layers=5"]
    assert {"rollout.options.gpus_per_engine=64", "rollout.engine.gpu_memory_utilization=0.1"} <= {*engine}


def _short_of_memory(inputs: MemoryInputs) -> str:
    try:
        check_fit(inputs, REGISTRY, lambda config: nodes(replace(inputs, config=config)))
    except ConfigError as error:
        return str(error)
    return ""


def test_what_several_checks_meet_is_told_once(models: None) -> None:
    """An option that cannot be, which engines' places and memory both depend on."""
    problems = find_problems(*compose_job(["+cluster=h20x96", "model.hf=deepseek671b", "rollout.engine.gpu_memory_utilization=70"]))[0]
    assert [str(problem).partition(":")[0] for problem in problems].count("rollout.engine.gpu_memory_utilization=70") == 1


def test_without_the_model() -> None:
    """The number of parameters is enough to see what no division of them could mend."""
    said = refused(*DEEPSEEK_ON_32)
    assert "layout.world_size=32: a GPU needs at least 117.2 GiB " in said
    assert "a node needs at least 2531.7 GiB in the weight sync (optimizer 2499.7, processes 32.0), " in said
    assert said.endswith("Use layout.world_size=64 or more, and sizes that divide the model further.")


def test_a_cluster_that_is_too_small() -> None:
    """No number of its GPUs would do."""
    said = refused("+cluster=h100x8", "model=deepseek671b", "layout.world_size=8", "layout.ep_size=8", "rollout=transformers")
    assert said.startswith("layout.world_size=8: a GPU needs at least ")
    assert said.endswith("Use GPUs or nodes with more memory, or a smaller model.")


def test_hosts_that_take_differently_many(models: None, tmp_path: Path) -> None:
    """The fullest counts."""
    (tmp_path / "hosts").write_text("n1 slots=7\nn2 slots=1\n")
    job = ("+cluster=h20x8", "launcher=mpi", "cluster.hostfile=hosts", "model.hf=qwen3_30b", "rollout.options.gpus_per_engine=1")
    job += ("rollout.engine.gpu_memory_utilization=0.8",)
    assert "a node needs at least 426.1 GiB" in refused(*job, "cluster.host_memory_gib=426")
    assert refused(*job, "cluster.host_memory_gib=427") == ""


def test_nodes_without_gpus(models: None) -> None:
    """All is in their memory, engines too."""
    job = (
        "+cluster=local",
        "launcher=slurm",
        "model.hf=qwen3_30b",
        "layout.world_size=2",
        "layout.ep_size=2",
        "cluster.host_memory_gib=500",
    )
    said = refused(*job)
    assert "a node needs at least 694.8 GiB while engines generate (" in said
    assert "engine's weights 227.5" in said


def test_fp32_has_no_hybrid_optimizer(models: None) -> None:
    """What the ranks would refuse is refused before."""
    problems = find_problems(*compose_job(["+cluster=h20x96", "model.hf=deepseek671b", "train.precision=fp32", "data.train=x"]))[0]
    assert [str(problem) for problem in problems if "cpu_adam" in str(problem)] == [
        "offload=cpu_adam: needs train.precision=bf16, is fp32. Set train.precision=bf16, or another offload."
    ]


def test_tensor_parallel_ranks_stay_on_a_node() -> None:
    """Whatever else is advised: between nodes each layer would wait for the network."""
    inputs = job("+cluster=h20x96")
    for node in (4, 8):
        config = replace(inputs.config, cluster=replace(inputs.config.cluster, gpus_per_node=node), layout=LayoutConfig(world_size=96))
        assert max(layout.tp_size for layout in layouts(replace(inputs, config=config))) == node
