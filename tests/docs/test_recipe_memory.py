"""Memory in docs/: the table of recipes, dry runs and refusals are what submit computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlbatch.config.choices import group_choices
from rlbatch.plan.engine_memory import demand
from rlbatch.plan.memory import memory_floor, trainer_gib
from rlbatch.registry import compose_job
from rlbatch.submit import main
from tests.large_models import CONFIGS, write_model


@pytest.mark.parametrize("layout", sorted(group_choices()["layout"]))
def test_the_memory_of_a_recipe(layout: str, repository: Path, tmp_path: Path) -> None:
    """The row has the GPU, the trainer's floor in updates and in generation, the engine's share, and what is left, which is at least 7 GiB
    for what the floor leaves out.
    """
    model, _, cluster = layout.rpartition("_")
    gpus, _, gpu = cluster.partition("x")
    config, registry = compose_job(
        [f"+cluster={gpu}x{gpus}", f"model={model}", f"model.hf={write_model(model, tmp_path / model)}", "data.train=y"]
    )
    job = demand(config, registry, registry.resolve_model_family(CONFIGS[model]), on_gpu=True)
    floor, beside = memory_floor(job), trainer_gib(job)
    total, share = config.cluster.gpu_memory_gib, config.rollout.engine["gpu_memory_utilization"]
    left = total - beside - share * total
    trainer = floor.gpu(phases=["load", "log-probs", "update", "save"])
    host = floor.fullest_host([8] * (config.layout.world_size // 8))
    row = (
        f"| `{layout}` | {total:g} | {trainer.gib:.1f}, {trainer.phase} | {beside:.1f} | {share:g} | {share * total:.1f} | {left:.1f} | "
        f"{host.gib:.0f}, {host.phase} |"
    )
    assert row in (repository / "docs/how_it_works/memory.md").read_text(encoding="utf-8").splitlines()
    assert left >= 7


@pytest.mark.parametrize(
    ("page", "model", "overrides", "shown"),
    [
        ("use/slurm", "deepseek671b", ["+cluster=h100x128"], ["Engines ", "Memory ", "At least ", "of 2000 GiB a node: ", "Interpreter "]),
        ("use/vllm", "deepseek671b", ["+cluster=h100x128"], ["Engines ", "Memory ", "Interpreter "]),
        ("use/slurm", "qwen3_235b", ["+cluster=h20x32", "cluster.host_memory_gib=1700"], ["layout.world_size=32: "]),
        (
            "how_it_works/memory",
            "deepseek671b",
            [
                "+cluster=h100x128",
                "model=deepseek671b",
                *(f"layout.{size}" for size in "world_size=32 tp_size=8 pp_size=4 ep_size=8 cp_size=1".split()),
            ],
            ["layout.world_size=32: "],
        ),
    ],
)
def test_a_dry_run_as_the_page_shows_it(
    page: str,
    model: str,
    overrides: list[str],
    shown: list[str],
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command stands in the page, and so does each of the lines that begin so."""
    text = " ".join((repository / f"docs/{page}.md").read_text(encoding="utf-8").split())
    assert all(override in text for override in overrides)
    monkeypatch.setenv("MODEL_DIR", str(write_model(model, tmp_path / model)))
    monkeypatch.setenv("TRAIN_DATA", str(tmp_path / "train.jsonl"))
    main([*overrides, "rollout.engine.python=/shared/vllm/bin/python", "dry_run=true"])
    told = capsys.readouterr()
    lines = [" ".join(line.split()) for line in (told.out + told.err).splitlines()]
    for begin in shown:
        (line,) = [line for line in lines if line.startswith(begin)]
        assert line in text
