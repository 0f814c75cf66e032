"""slurm/*.sbatch against what `python -m rlbatch.submit` makes of the same cluster and model."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from rlbatch.config.compose import compose, load_config
from rlbatch.config.schema import Config
from rlbatch.job_parts import parameter_count
from rlbatch.launch.starters.sbatch import BEGINNING, ENDING, SRUN
from rlbatch.registry import load_plugins
from rlbatch.start import TASK_VARIABLES, slurm_script
from rlbatch.submit import main
from tests.large_models import CONFIGS

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(path.name for path in (ROOT / "slurm").glob("*.sbatch"))
LISTED = [
    "deepseek671b_128xh100",
    *(f"deepseek671b_{gpus}xh20" for gpus in (96, 128, 256, 512)),
    *(f"qwen3_235b_{gpus}xh20" for gpus in (32, 64, 128, 256)),
    *(f"qwen3_30b_{gpus}xh20" for gpus in (8, 16, 32)),
    "local_smoke",
]
REGISTRY = load_plugins()
EMBEDDED_PARAMETERS = 100_000
"""Of the smoke run's model, about."""
OF_THE_PLACE = {"--output"}
"""Options that say where, not what."""


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)


def text(name: str) -> str:
    return (ROOT / "slurm" / name).read_text(encoding="utf-8")


def header(script: str) -> Mapping[str, str]:
    lines = re.findall(r"^#SBATCH (.*)$", script, re.MULTILINE)
    options = dict((*shlex.split(line)[0].partition("=")[::2],) for line in lines)
    return {name: value for name, value in options.items() if name not in OF_THE_PLACE}


def exports(script: str) -> Mapping[str, str]:
    lines = re.findall(r"^export (.*)$", script, re.MULTILINE)
    return dict(word.partition("=")[::2] for line in lines for word in shlex.split(line))


def overrides(script: str) -> list[str]:
    """Those of the script's one call of submit."""
    (line,) = re.findall(r"-m rlbatch\.submit (.*)$", script, re.MULTILINE)
    return [word for word in shlex.split(line.replace("$run", "RUN")) if word != "$@"]


def submitted(name: str) -> tuple[Config, str]:
    """The config and batch script of submit for the same cluster and model."""
    words = [word for word in overrides(text(name)) if word.partition("=")[0] not in ("launcher", "run_dir", "resume")]
    config = compose([*words, "launcher=slurm"])
    family = REGISTRY.resolve_model_family(CONFIGS[config.model.name]) if config.model.name else None
    return config, slurm_script(config, REGISTRY, Path("/runs/mine"), parameter_count(config, family) or EMBEDDED_PARAMETERS)


def test_every_script_is_there() -> None:
    """One for each row of the guides' tables, and the smoke run."""
    assert sorted(f"{name}.sbatch" for name in LISTED) == SCRIPTS


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_short(name: str) -> None:
    """Fewer than 40 lines: a header, checks, the run folder, one srun."""
    script = text(name)
    assert len(script.splitlines()) < 40
    assert len(re.findall(r"^\s*srun ", script, re.MULTILINE)) == 1
    assert script.startswith("#!/bin/bash\n")
    subprocess.run(["bash", "-n", ROOT / "slurm" / name], check=True)


@pytest.mark.parametrize("name", SCRIPTS)
def test_same_resources_and_environment(name: str) -> None:
    """The options of sbatch, the exports and srun's options are those of submit."""
    script, (_, generated) = text(name), submitted(name)
    assert header(script) == header(generated)
    assert exports(script) == {key: value for key, value in exports(generated).items() if key not in TASK_VARIABLES}
    for made, run in ((script, '"$run"'), (generated, "/runs/mine")):
        assert f"\n{BEGINNING.format(run=run)}\nsrun {' '.join(SRUN)} " in made
        assert made.endswith(f" && code=0 || code=$?\n{ENDING.format(run=run)}\n")


@pytest.mark.parametrize("name", SCRIPTS)
def test_same_config(name: str) -> None:
    """The resolved config is that of submit, but for who starts the ranks and where."""
    config, _ = submitted(name)
    by_script = compose(overrides(text(name)))
    assert replace(by_script, launcher="slurm", run_dir="", resume="never") == config
    assert (by_script.launcher, Path(by_script.run_dir).name, by_script.resume) == ("none", "RUN", "auto")
    if name != "local_smoke.sbatch":
        assert f"{config.cluster.name}" in overrides(text(name))[0]
        assert name.startswith(f"{config.model.name}_{config.cluster.gpus}x{config.cluster.gpu.lower()}")


def run_script(name: str, tmp_path: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a batch script as sbatch would, with an srun that shows its arguments."""
    fake = tmp_path / "bin"
    fake.mkdir(exist_ok=True)
    (fake / "srun").write_text('#!/bin/sh\necho "srun $@"; rm runs/*/unfinished\n')
    (fake / "srun").chmod(0o755)
    environment = {"PATH": f"{fake}:{os.environ['PATH']}", "PYTHON": sys.executable, "HOME": str(tmp_path), **variables}
    return subprocess.run(
        ["bash", str(ROOT / "slurm" / name), *arguments],
        cwd=tmp_path,
        env=environment | {"XDG_STATE_HOME": str(tmp_path / "state")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("keys", "variables", "message"),
    [
        ([], {}, "model.hf=$MODEL_DIR: the environment variable MODEL_DIR is not set. Set it, or give model.hf=<path>."),
        ([], {"MODEL_DIR": "/absent", "TRAIN_DATA": "/absent.jsonl"}, "/absent/config.json: not there. "),
        (["model.hf=/absent", "data.train=/absent.jsonl"], {}, "/absent/config.json: not there. "),
    ],
)
def test_missing_paths(tmp_path: Path, keys: list[str], variables: dict[str, str], message: str) -> None:
    """A path that is not set, or not there, is submit's message and code, and nothing starts; it may be a variable or a key."""
    done = run_script("deepseek671b_96xh20.sbatch", tmp_path, *keys, SLURM_JOB_ID="7", **variables)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""
    assert not (tmp_path / "runs").exists()


def test_smoke_script_makes_the_run_folder(tmp_path: Path) -> None:
    """It makes the run folder of its job, with further overrides, and starts that folder's ranks; a requeued job finds it again."""
    for _ in range(2):
        done = run_script("local_smoke.sbatch", tmp_path, "train.steps=3", SLURM_JOB_ID="7", SLURM_NTASKS="4", SLURM_JOB_NUM_NODES="2")
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1].endswith("-m rlbatch.run --run-dir runs/7")
        config = load_config(tmp_path / "runs/7/config.yaml")
        assert (config.train.steps, config.layout.world_size, config.launcher) == (3, 4, "none")


def test_allocation_of_another_size(tmp_path: Path) -> None:
    """More or fewer tasks than the layout has ranks are refused with both numbers, before srun."""
    done = run_script("local_smoke.sbatch", tmp_path, SLURM_JOB_ID="7", SLURM_NTASKS="8", SLURM_JOB_NUM_NODES="4")
    assert done.returncode == 2
    assert "layout.world_size=4: needs 2 nodes x 2 tasks, this allocation has SLURM_NTASKS=8." in done.stderr
    assert "srun" not in done.stdout
    assert main(["launcher=none", "train.steps=0"]) == 2


CODES = {0: 0, 1: 1, 2: 2, 3: 1, 9: 1, 75: 75, 134: 1, 137: 1, 139: 1, 140: 140, 143: 143}
"""srun's -> the job's."""


@pytest.mark.parametrize("of_srun", CODES)
def test_exit_code(of_srun: int, tmp_path: Path) -> None:
    """srun's code is the highest of all ranks'; the job's is one of those that are documented, 1 if a rank has failed, and also where the
    ranks' is one that they may end with before our code runs in them: 0, or srun's SIGTERM.
    """
    script = f"set -euo pipefail\n{BEGINNING}\nsh -c '{{rank_0}}exit {of_srun}' && code=0 || code=$?\n{ENDING}\n"

    def code_of(rank_0: str) -> int:
        return subprocess.run(["bash", "-c", script.format(run=tmp_path, rank_0=rank_0)], check=False).returncode

    assert code_of("") == (1 if of_srun in (0, 143) else CODES[of_srun])
    assert code_of(f"rm {tmp_path}/unfinished; ") == CODES[of_srun]
    (tmp_path / "first_error.json").touch()
    assert code_of(f"rm {tmp_path}/unfinished; ") == min(of_srun, 1)
