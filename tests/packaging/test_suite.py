"""The suite itself: what `make test` leaves out, which tests CI then runs, and where each test file is."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests import long_tail
from tests.conftest import DURATIONS
from tests.long_tail import PATHS, changed_since, concerned

OTHERS = ("cluster", "docs", "examples", "packaging")
"""Folders of tests that are of no module."""
SCENARIOS = {
    "algorithms/test_learning.py",
    "algorithms/test_published_cases.py",
    "align/test_command.py",
    "align/test_right_models.py",
    "config/test_clusters.py",  # the shipped files
    "config/test_recipes.py",  # the shipped files
    "convert/test_command.py",
    "convert/test_dist.py",  # there and back
    "megatron/test_config_fields.py",
    "megatron/test_fp8.py",
    "megatron/test_grad_norm.py",
    "megatron/test_hybrid_optimizer.py",  # of patches.py
    "megatron/test_parity.py",
    "megatron/test_real_models.py",
    "megatron/test_released.py",
    "pipeline/test_call_order.py",
    "pipeline/test_engine_sync.py",
    "pipeline/test_sampler.py",
    "plugins/test_advantages.py",
    "plugins/test_code_sandbox.py",
    "plugins/test_filters.py",
    "plugins/test_losses.py",
    "plugins/test_sglang_experts.py",
    "plugins/test_sglang_failures.py",
    "plugins/test_vllm_group.py",
    "plugins/test_vllm_layouts.py",
    "plugins/test_vllm_nodes.py",
    "plugins/test_vllm_order.py",
    "plugins/test_vllm_speculation.py",
    "test_batch_scripts.py",
    "test_plugin_names.py",
    "test_resume.py",
    "test_sglang_recovery.py",
    "test_submit_mpi.py",
    "test_submit_slurm.py",
    "test_vllm_job.py",
    "test_vllm_recovery.py",
    "test_without_torch.py",
    "testing/test_promises.py",
    "weights/test_export_views.py",
    "weights/test_memory.py",
}
"""Test files of what several modules do together, or of one that has another file too."""


def test_the_long_tail_depends_on_what_is_there(repository: Path) -> None:
    """Every path that a name stands for is the beginning of a file's, and every name that a mark has is known."""
    for paths in (*PATHS.values(), long_tail.EVERYTHING):
        assert [path for path in paths if not list(repository.glob(f"{path.rstrip('/')}*"))] == []
    marks = [mark for path in (repository / "tests").rglob("*.py") for mark in re.findall(r"mark\.long\(([^)]*)\)", path.read_text())]
    names = {name.strip(' "') for mark in marks for name in mark.split(",")}
    assert names - {""} == set(PATHS)


@pytest.mark.parametrize(
    ("changed", "runs"),
    [
        (["plugins/vllm_host/engine.py"], True),
        (["docs/use/resume.md", "plugins/sglang_host/engine.py"], False),
        (["tests/packaging/test_suite.py"], True),
        (["constraints.txt"], True),
        ([], False),
        (None, True),
    ],
)
def test_a_test_of_the_long_tail_runs_when_what_it_depends_on_changed(
    changed: list[str] | None, runs: bool, request: pytest.FixtureRequest
) -> None:
    """Or the test, or what all depend on; or if nobody knows what changed. Tests that are not of the long tail always run."""
    item = request.node
    assert concerned([item], changed) == [item]
    item.add_marker(pytest.mark.long("vllm"))
    assert concerned([item], changed) == ([item] if runs else [])


def test_what_changed_is_what_git_says(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a file was moved from; nothing is known of a commit that is not there."""
    monkeypatch.setattr(long_tail, "ROOT", tmp_path)

    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a", *words], cwd=tmp_path, check=True, capture_output=True)

    (tmp_path / "a").write_text("text\n" * 9)
    git("init")
    git("add", ".")
    git("commit", "-m", "a")
    git("mv", "a", "b")
    git("commit", "-m", "b")
    assert changed_since("HEAD") == []
    assert changed_since("HEAD~1") == ["a", "b"]
    assert changed_since("0" * 40) is None


def test_durations_are_of_files(repository: Path) -> None:
    """The longest come first; every file is there."""
    lines = [line.split() for line in DURATIONS.read_text().splitlines()]
    assert [path for _, path in lines if not (repository / path).exists()] == []
    assert lines == sorted(lines, key=lambda line: -float(line[0]))


def test_tests_mirror_the_source(repository: Path) -> None:
    """The tests of a module are in a file of its name at the module's place; the others are named above, each once."""
    tests, found = repository / "tests", set()
    for path in tests.rglob("test_*.py"):
        file = path.relative_to(tests)
        module = file.with_name(file.name.removeprefix("test_"))
        places = (repository / module, repository / "rlbatch" / module) if len(file.parts) > 1 else (repository / "rlbatch" / module,)
        if file.parts[0] not in OTHERS and not any(place.is_file() for place in places):
            found.add(file.as_posix())
    assert found == SCENARIOS
