"""The pages on plugins in docs/use against the hooks, and its examples against the registry."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

import rlbatch.api
from rlbatch import reward_parts
from rlbatch.api import DataError, Prompt, Sample, decoder, hookspecs
from rlbatch.config.schema import AlgorithmConfig
from rlbatch.registry import KINDS, load_plugins
from tests.algorithms.loss_tables import Pack
from tests.megatron.real_models import CONFIGS

HOOKS = {name: function for name, function in inspect.getmembers(hookspecs, inspect.isfunction) if name.startswith("rlbatch_")}


@pytest.fixture(scope="module")
def page(repository: Path) -> str:
    """The pages in one, the reward's first."""
    return "\n".join(
        (repository / f"docs/use/{name}.md").read_text(encoding="utf-8")
        for name in ("reward", "plugins", "rollout_backends", "model_families", "trackers")
    )


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


def sample(prompt_text: str, label: str, response: str) -> Sample:
    return Sample(Prompt(0, prompt_text, (1,), label), 0, [1, 2, 3], [0, 1, 1], [0, 0, 0], response, "stop")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_is_documented(page: str, name: str) -> None:
    """Each hook stands in the page with its exact arguments and result."""
    signature = str(inspect.signature(HOOKS[name])).replace("'", "")
    assert f"\n{name}{signature}\n" in page


def test_no_invented_hook(page: str) -> None:
    """Each name in the page that looks like a hook is one."""
    assert {word for word in re.findall(r"\brlbatch_\w+", page) if word not in ("rlbatch_llama",)} == set(HOOKS)


def test_every_registering_hook_is_called() -> None:
    """The registry asks every hook that there is: none is declared and forgotten."""
    assert set(KINDS) | {"rlbatch_resolve_model_family"} == set(HOOKS)


def test_names_of_the_page_exist(page: str) -> None:
    """What a reward is told to read exists on a sample, and what is named as importable is in rlbatch.api."""
    prompt_fields = {field.name for field in fields(Prompt)}
    sample_fields = {field.name for field in fields(Sample)} | {"response_length"}
    assert set(re.findall(r"sample\.prompt\.(\w+)", page)) <= prompt_fields
    assert set(re.findall(r"sample\.(\w+)", page)) <= sample_fields
    imported = {name.strip() for line in re.findall(r"from rlbatch\.api import (.*)", page) for name in line.split(",")}
    assert imported <= set(rlbatch.api.__all__)


def test_worked_reward(page: str, tmp_path: Path) -> None:
    """The page's first example has at most 15 lines and works as it stands, saved to a file."""
    code = blocks(page)[0]
    assert len(code.splitlines()) <= 15
    path = tmp_path / "my_reward.py"
    path.write_text(code)
    reward = load_plugins([str(path)]).build_reward("contains_label", {})
    assert list(reward([sample("a", "b c", "x b c"), sample("a", "b c", "c d")])) == [1.0, 0.5]


def test_reward_that_checks_labels(page: str, tmp_path: Path) -> None:
    """The example with labels works as it stands, and refuses a label by the reward's name."""
    path = tmp_path / "letter.py"
    path.write_text(blocks(page)[1])
    registry = load_plugins([str(path)])
    assert list(registry.build_reward("letter", {})([sample("a", "B", " B\n"), sample("a", "A", "B")])) == [1.0, 0.0]
    reward_parts.label_check(registry.rewards, "letter", {})("A")
    with pytest.raises(DataError, match="^reward=letter: label 'E' must be A, B, C or D"):
        reward_parts.label_check(registry.rewards, "letter", {})("E")


def test_the_table_of_a_sample_is_complete(page: str) -> None:
    """Every field that a reward may read has its row."""
    named = set(re.findall(r"^\| `sample\.([a-z_.]+)` \|", page, re.MULTILINE))
    wanted = {field.name for field in fields(Sample)} - {"prompt"} | {"response_length"} | {f"prompt.{f.name}" for f in fields(Prompt)}
    assert named == wanted


def test_reward_with_options(page: str, tmp_path: Path) -> None:
    """The example with options works as it stands."""
    path = tmp_path / "short.py"
    path.write_text(blocks(page)[2])
    reward = load_plugins([str(path)]).build_reward("short", {"limit": 1})
    assert list(reward([sample("a", "b", "b b")])) == [-0.01]


def test_example_file(repository: Path) -> None:
    """examples/reward_plugin.py has at most 15 lines and is what the page shows."""
    path = repository / "examples/reward_plugin.py"
    assert len(path.read_text().splitlines()) <= 15
    reward = load_plugins([str(path)]).build_reward("contains_label", {})
    assert list(reward([sample("a", "b", "a b"), sample("a", "b", "a")])) == [1.0, 0.0]


def test_megatrons_names_are_documented(page: str) -> None:
    """Those that mappings of our families use."""
    used = {mapping.megatron for config in CONFIGS.values() for mapping in load_plugins().resolve_model_family(config).mappings}
    assert sorted(name for name in used if f"`{name.removeprefix(decoder.LAYER)}`" not in page) == []


def test_engines_modules_are_documented(page: str, repository: Path) -> None:
    """The table has the modules of rlbatch.engines that the built-in backends import, and no other."""
    table = page.partition("## Engines in processes of their own")[2].partition("# Adding a model family")[0]
    named = {name for row in re.findall(r"^\| (`\w+\..*?) \|", table, re.MULTILINE) for name in re.findall(r"`([\w.]+)`", row)}
    sources = [path.read_text(encoding="utf-8") for path in (repository / "plugins").rglob("*.py")]
    modules = {module for source in sources for module in re.findall(r"from rlbatch\.engines\.([\w.]+) import", source)}
    packages = {
        match for source in sources for match in re.findall(r"from rlbatch\.engines\.(\w+) import ([a-z_]+)$", source, re.MULTILINE)
    }
    used = {name for name in modules if "." in name} | {".".join(names) for names in packages}
    assert used == named


def test_gspo_from_the_page(page: str, repository: Path) -> None:
    """The page's GSPO is examples/loss_plugin.py, has at most 15 lines, and gives what the built-in one gives, value and gradient."""
    code = next(block for block in blocks(page) if "my_gspo" in block)
    path = repository / "examples/loss_plugin.py"
    assert path.read_text().endswith(code)
    assert len(code.splitlines()) <= 15
    registry = load_plugins([str(path)])
    mine, ours = (registry.build_loss(AlgorithmConfig(loss=name)) for name in ("my_gspo", "gspo"))
    random = np.random.default_rng(0)
    tables = {name: random.normal(-1, 0.3, (4, 5)).tolist() for name in ("logprobs", "old_logprobs")}
    advantages = [[value] * 5 for value in (0.5, -1.0, 2.0, -0.1)]
    pack = Pack([[1] * 5, [0, 1, 1, 0, 0], [0] * 5, [0, 0, 1, 1, 1]], tables | {"advantages": advantages})
    (loss, gradient), (expected, expected_gradient) = (pack.loss_and_gradient(policy, "sequence_mean") for policy in (mine, ours))
    assert loss == expected
    assert gradient.any()
    assert torch.equal(gradient, expected_gradient)
