"""setup.cfg against the folders, and the wheel that it makes."""

from __future__ import annotations

import ast
import configparser
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

IMPORT_NAMES = {"hydra-core": "hydra", "math-verify": "math_verify", "megatron-core": "megatron", "pyyaml": "yaml"}
OPTIONAL = {"mlflow", "sglang", "transformer_engine", "triton", "vllm", "wandb"}  # used where they are installed
COPIED = {"wire"}  # of plugins/code_sandbox, into jails
OF_OTHERS = {"sympy"}  # math-verify's values are its
NEEDED_INDIRECTLY = {"tensorboard"}  # by torch.utils.tensorboard


@pytest.fixture(scope="module")
def setup(repository: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(delimiters="=")
    parser.read(repository / "setup.cfg", encoding="utf-8")
    return parser


@pytest.fixture(scope="module")
def installed_wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel of this checkout is installed."""
    source, wheels, target = (tmp_path_factory.mktemp(name) for name in ("source", "wheels", "target"))
    for name in ("rlbatch", "plugins", "configs"):
        shutil.copytree(repository / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(repository / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(wheels), str(source)], check=True)
    (wheel,) = wheels.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)], check=True)
    return target


def lines(setup: configparser.ConfigParser, section: str, option: str) -> list[str]:
    return setup[section][option].split("\n")[1:]


def requirement_names(setup: configparser.ConfigParser) -> set[str]:
    return {line.split(">")[0] for line in lines(setup, "options", "install_requires")}


def test_each_plugin_module_has_one_entry_point(repository: Path, setup: configparser.ConfigParser) -> None:
    """plugins/ and the entry points name the same modules, each under its own name."""
    modules = sorted(path.stem for path in (repository / "plugins").glob("*.py") if path.stem != "__init__")
    assert lines(setup, "options.entry_points", "rlbatch") == [f"{name} = rlbatch_plugins.{name}" for name in modules]


def test_each_package_is_listed(repository: Path, setup: configparser.ConfigParser) -> None:
    """The packages are the folders with an __init__.py, and every folder with code or a config has one."""
    found = set()
    for name, folder in {"rlbatch": "rlbatch", "rlbatch_plugins": "plugins", "rlbatch_configs": "configs"}.items():
        files = [*(repository / folder).rglob("*.py"), *(repository / folder).rglob("*.yaml")]
        for parent in {file.parent for file in files}:
            assert (parent / "__init__.py").exists(), parent
            found.add(".".join((name, *parent.relative_to(repository / folder).parts)))
    assert sorted(lines(setup, "options", "packages")) == sorted(found)


def test_dependencies_are_ranges_and_what_is_imported(repository: Path, setup: configparser.ConfigParser) -> None:
    """Every third-party import is declared, nothing else is, and nothing is pinned; the constraints pin torch."""
    imported = set()
    for folder in ("rlbatch", "plugins"):
        for path in (repository / folder).rglob("*.py"):
            imported |= {name.partition(".")[0] for name in imported_modules(path)}
    third_party = imported - sys.stdlib_module_names - {"rlbatch", "rlbatch_configs", "rlbatch_plugins"}
    declared = {IMPORT_NAMES.get(name, name) for name in requirement_names(setup)}
    assert (third_party | NEEDED_INDIRECTLY) - OPTIONAL - COPIED - OF_OTHERS == declared
    assert not [line for line in lines(setup, "options", "install_requires") if "==" in line]
    assert "torch==2.13.0\n" in (repository / "constraints.txt").read_text(encoding="utf-8")


def test_the_lowest_versions_are_those_that_are_run(repository: Path, setup: configparser.ConfigParser) -> None:
    """`make versions` runs the lower bounds: one that nobody runs is a guess."""
    pinned = (repository / "tests/lowest.txt").read_text(encoding="utf-8").splitlines()
    bounds = [line.partition(",")[0].replace(">=", "==") for line in lines(setup, "options", "install_requires")]
    assert [line for line in pinned if not line.startswith("#")] == bounds


def test_no_ray(repository: Path) -> None:
    """Nothing of ours imports Ray, or a package that exists to drive it."""
    for folder in ("rlbatch", "plugins", "examples"):
        for path in (repository / folder).rglob("*.py"):
            assert not [name for name in imported_modules(path) if name.partition(".")[0] == "ray"], path


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def test_the_wheel_has_every_config(repository: Path, installed_wheel: Path) -> None:
    """The wheel carries the same yaml files as configs/."""
    ours = {path.relative_to(repository / "configs") for path in (repository / "configs").rglob("*.yaml")}
    theirs = {path.relative_to(installed_wheel / "rlbatch_configs") for path in installed_wheel.rglob("*.yaml")}
    assert ours == theirs
    assert Path("config.yaml") in ours


def test_the_wheel_works_from_any_folder(installed_wheel: Path, tmp_path: Path) -> None:
    """Away from the checkout the wheel's own modules, configs and entry points answer."""
    environment = os.environ | {"PYTHONPATH": str(installed_wheel)}

    def run(*arguments: str) -> str:
        return subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True, timeout=60
        ).stdout

    modules = run(
        "-c", "import rlbatch, rlbatch_plugins, rlbatch_configs as c; print(rlbatch.__file__, rlbatch_plugins.__file__, c.__file__)"
    )
    assert modules.split() == [str(installed_wheel / name / "__init__.py") for name in ("rlbatch", "rlbatch_plugins", "rlbatch_configs")]
    assert "train.max_tokens_per_gpu" in run("-m", "rlbatch.submit", "--help")
    assert "model_qwen3_moe" in run("-m", "rlbatch.plugins")
