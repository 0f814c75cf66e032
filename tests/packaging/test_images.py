"""docker/Dockerfile: its versions are those of the installation's table, of the constraints and of what rlbatch takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlbatch_plugins.sglang_host import engine_options as sglang
from rlbatch_plugins.vllm_host import versions as vllm

ROWS = {
    "CUDA": "CUDA",
    "torch": "TORCH",
    "transformers": "TRANSFORMERS",
    "megatron-core": "MEGATRON_CORE",
    "Transformer Engine": "TRANSFORMER_ENGINE",
    "DeepEP": "DEEPEP",
    "vLLM": "VLLM",
    "SGLang": "SGLANG",
}
"""Row of the table -> argument of the Dockerfile."""
OF_MACHINES = {"ARCHITECTURES", "JOBS"}


@pytest.fixture(scope="module")
def arguments(repository: Path) -> dict[str, str]:
    return dict(re.findall(r"^ARG (\w+)=(\S+)$", (repository / "docker/Dockerfile").read_text(encoding="utf-8"), re.MULTILINE))


def constraints(repository: Path, name: str) -> dict[str, str]:
    lines = (repository / name).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_the_table_says_what_the_images_have(repository: Path, arguments: dict[str, str]) -> None:
    """Row by row; and every version of the file is in the table."""
    table = (repository / "docs/use/install.md").read_text(encoding="utf-8").partition("| [docker/Dockerfile]")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    said = {ROWS[row[0]]: row[3] for row in rows if row[0] in ROWS}
    assert said == {name: value for name, value in arguments.items() if name not in OF_MACHINES}


def test_engines_have_the_versions_that_they_ran_with(repository: Path, arguments: dict[str, str]) -> None:
    """Each engine's constraints pin every name once and the trainer's torch, whose memory it opens; rlbatch takes both engines, and does
    not warn of vLLM's version.
    """
    for engine in ("vllm", "sglang"):
        pins = constraints(repository, f"docker/{engine}.txt")
        assert pins["torch"] == arguments["TORCH"]
        assert len(pins) > 40
        assert engine not in pins
    assert vllm.version_refusal("vllm", arguments["VLLM"], "python") == vllm.untried("vllm", arguments["VLLM"]) == ""
    assert sglang.version_refusal(arguments["SGLANG"], "python") == ""


def test_the_trainer_is_the_one_that_is_tested(repository: Path, arguments: dict[str, str]) -> None:
    """megatron-core as in the tests, and everything that the package is made of is copied."""
    assert constraints(repository, "constraints.txt")["megatron-core"] == arguments["MEGATRON_CORE"]
    copied = re.findall(r"^COPY (.+) \S+$", (repository / "docker/Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    names = {name for line in copied for name in line.split()}
    assert names == {
        "LICENSE",
        "README.md",
        "pyproject.toml",
        "setup.cfg",
        "configs",
        "plugins",
        "rlbatch",
        "docker/vllm.txt",
        "docker/sglang.txt",
    }
    assert all((repository / name).exists() for name in names)
