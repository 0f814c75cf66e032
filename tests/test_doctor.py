"""The command `python -m rlbatch.doctor`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import rlbatch.doctor
from rlbatch.doctor import Line

WITHOUT = """
import sys
for name in ("torch", "megatron", "transformers"):
    sys.modules[name] = None
from importlib import metadata
version = metadata.version
def without(name):
    if name == "torch":
        raise metadata.PackageNotFoundError(name)
    return version(name)
metadata.version = without
import rlbatch.doctor
sys.exit(rlbatch.doctor.main(["launcher=local"]))
"""


def found(capsys: pytest.CaptureFixture[str], *keys: str) -> tuple[int, dict[str, str]]:
    """Exit code, and each thing's line."""
    code = rlbatch.doctor.main(keys)
    return code, {line[9:24].strip(): line for line in capsys.readouterr().out.splitlines()}


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each thing, and nothing wrong with what the demo needs."""
    code, said = found(capsys)
    assert code == 0
    assert {"rlbatch", "packages", "GPUs", "Slurm", "mpirun", "memory", "shared memory", "network", "run folders", "open files"} <= set(
        said
    )
    assert "megatron-core 0.16" in said["packages"]
    assert not any(line.startswith("wrong") for line in said.values())


def test_an_engine_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    """Is wrong if the job wants it, and what to do is said."""
    code, said = found(capsys, "rollout=vllm", f"rollout.engine.python={sys.executable}")
    assert code == 1
    assert said["rollout=vllm"].startswith("wrong")
    assert "has no vLLM. Install vllm " in said["rollout=vllm"]


def test_what_the_launcher_needs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without sbatch and mpirun only jobs that start by them are wrong."""
    monkeypatch.setenv("PATH", "/nowhere")
    code, said = found(capsys, "launcher=slurm")
    assert (code, said["Slurm"].split()[0], said["mpirun"].split()[0]) == (1, "wrong", "ok")
    code, said = found(capsys, "launcher=mpi")
    assert (code, said["Slurm"].split()[0], said["mpirun"].split()[0]) == (1, "ok", "wrong")


def test_an_sbatch_that_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What it says itself is shown."""
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho first >&2\necho 'sbatch: fatal: no configuration.' >&2\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert found(capsys)[1]["Slurm"].endswith("does not answer (`sbatch --version`: sbatch: fatal: no configuration). Ask the site")


def test_packages_of_other_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not suit is wrong, with the version that does; one that is not there is right for a login node."""
    monkeypatch.setattr(
        rlbatch.doctor.metadata, "requires", lambda name: ["numpy<1", "absent-package>=2", "pluggy", "dev-tool; extra == 'dev'"]
    )
    said = {line.what: line for line in rlbatch.doctor._packages()}
    assert said["numpy"].level == "wrong"
    assert said["numpy"].text.endswith("must be <1. pip install 'numpy<1'")
    assert said["absent-package"] == Line(
        "warning",
        "absent-package",
        "is not installed: right for a login node, from which jobs are only submitted; ranks need absent-package>=2",
    )
    assert said["packages"].text.startswith("pluggy ")
    assert set(said) == {"numpy", "absent-package", "packages"}


def test_a_login_node() -> None:
    """Without torch all else is looked at, nothing is imported that needs it, and it is told."""
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "warning  torch          is not installed: right for a login node" in done.stdout


def test_bad_keys_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    """A key that is none is one message and exit code 2; --help says what the command does."""
    assert rlbatch.doctor.main(["layout.worldsize=2"]) == 2
    assert "layout.worldsize" in capsys.readouterr().err
    assert rlbatch.doctor.main(["--help"]) == 0
    assert "Usage: python -m rlbatch.doctor" in capsys.readouterr().out
