"""Memory in docs/: the table of recipes, dry runs and refusals are what submit computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlbatch.config.sources import group_files
from rlbatch.plan.engine_memory import memory_inputs
from rlbatch.plan.memory import memory_floor, trainer_gib
from rlbatch.registry import compose_job
from rlbatch.submit import main
from tests.large_models import CONFIGS, write_model


@pytest.mark.parametrize("layout", sorted(group_files()["layout"]))
def test_the_memory_of_a_recipe(layout: str, repository: Path, tmp_path: Path) -> None:
    """The row has the GPU, the trainer's floor in updates and in generation, the engine's share, and what is left, which is at least 7 GiB
    for what the floor leaves out.
    """
    model, _, cluster = layout.rpartition("_")
    gpus, _, gpu = cluster.partition("x")
    config, registry = compose_job(
        [f"+cluster={gpu}x{gpus}", f"model={model}", f"model.hf={write_model(model, tmp_path / model)}", "data.train=y"]
    )
    job = memory_inputs(config, registry, registry.resolve_model_family(CONFIGS[model]), on_gpu=True)
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


ENGINES = ["Engines ", "Memory ", "Interpreter "]
REFUSED = ["layout.world_size=32: "]
DIVIDED = "model=deepseek671b layout.world_size=32 layout.tp_size=8 layout.pp_size=4 layout.ep_size=8 layout.cp_size=1"


@pytest.mark.parametrize(
    ("model", "command", "shown"),
    [
        ("deepseek671b", "+cluster=h100x128", {"use/slurm": [*ENGINES, "At least ", "of 2000 GiB a node: "], "use/vllm": ENGINES}),
        ("qwen3_235b", "+cluster=h20x32 cluster.host_memory_gib=1100 rollout.options.sleep_level=1", {"use/slurm": REFUSED}),
        ("deepseek671b", f"+cluster=h100x128 {DIVIDED}", {"how_it_works/memory": REFUSED}),
    ],
)
def test_a_dry_run_as_the_page_shows_it(
    model: str,
    command: str,
    shown: dict[str, list[str]],
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command stands in the page, and so does each of the lines that begin so."""
    monkeypatch.setenv("MODEL_DIR", str(write_model(model, tmp_path / model)))
    monkeypatch.setenv("TRAIN_DATA", str(tmp_path / "train.jsonl"))
    main([*command.split(), "rollout.engine.python=/shared/vllm/bin/python", "dry_run=true"])
    told = capsys.readouterr()
    lines = [" ".join(line.split()) for line in (told.out + told.err).splitlines()]
    for page, begins in shown.items():
        text = " ".join((repository / f"docs/{page}.md").read_text(encoding="utf-8").split())
        assert f" {command} " in text
        for begin in begins:
            (line,) = [line for line in lines if line.startswith(begin)]
            assert line in text
