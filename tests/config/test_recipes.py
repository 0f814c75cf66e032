"""Recipes: experiments of papers, each of which runs on the embedded model with one override."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlbatch.config.compose import compose
from rlbatch.prepare import find_problems
from rlbatch.registry import compose_job

RECIPES = ("gsm8k", "dapo", "dr_grpo", "gspo", "reinforce_plus_plus", "deepseek_r1")
HF = "model.hf=/models/some"


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_accepted_with_the_embedded_model(name: str) -> None:
    """All that submit checks holds, on two ranks of this machine."""
    config, registry = compose_job([f"experiment={name}", "model=embedded"])
    assert (config.model.hf, config.data.train, config.reward.name, config.layout.world_size) == ("embedded", "embedded", "sequence", 2)
    assert [str(problem) for problem in find_problems(config, registry)[0]] == []


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_scores_mathematics(name: str) -> None:
    """With the reward of its name, else as LaTeX."""
    assert compose([HF, f"experiment={name}"]).reward.name == ("gsm8k" if name == "gsm8k" else "math")


@pytest.mark.long("jobs", "configs")
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains(name: str, tmp_path: Path) -> None:
    """The run comes to its end."""
    command = [
        sys.executable,
        "-m",
        "rlbatch.submit",
        f"experiment={name}",
        "model=embedded",
        "train.steps=2",
        f"run_dir={tmp_path / 'run'}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 2)


def test_an_experiment_has_the_algorithm_of_its_name() -> None:
    """Unless another one is chosen; keys of the command line win over both."""
    dapo = compose([HF, "experiment=dapo"]).algorithm
    assert (dapo.eps_clip, dapo.eps_clip_high, dapo.overlong_penalty, dapo.group_size) == (0.2, 0.28, 1.0, 16)
    assert compose([HF, "experiment=dapo", "algorithm=gspo"]).algorithm.loss == "gspo"
    assert compose([HF, "experiment=gspo", "algorithm.eps_clip=0.1"]).algorithm.eps_clip == 0.1
    assert compose(["algorithm=dapo"]).algorithm.group_size == 16  # the embedded run's


def test_the_settings_of_deepseek_r1() -> None:
    """As in its recipe for 128 GPUs: clip, KL that is only measured, no entropy, dynamic sampling, 32k responses."""
    config = compose([HF, "experiment=deepseek_r1"])
    algorithm = config.algorithm
    assert (algorithm.advantage, algorithm.loss, algorithm.eps_clip, algorithm.eps_clip_high) == ("grpo", "clip", 0.2, 0.28)
    assert (algorithm.kl_loss, algorithm.kl_kind, algorithm.kl_loss_coef, algorithm.entropy_coef) == (True, "low_var_kl", 0.0, 0.0)
    assert (config.rollout.max_response_tokens, config.sampling.filters) == (32768, ("reward_spread",))


def test_every_recipe_is_on_the_page(repository: Path) -> None:
    """With a heading of its own."""
    page = (repository / "docs/use/recipes.md").read_text(encoding="utf-8")
    assert [name for name in RECIPES if f"\n## {name}: " not in page] == []
