"""What of the command line is a job's, and its run folder before ranks start."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlbatch.align import __main__ as command
from rlbatch.align.job.submit import asked, split
from rlbatch.config.compose import load_config
from tests import tiny_models
from tests.tiny_models import saved


def test_split() -> None:
    """Where a job runs, and how, is submit's; the rest is the command's own."""
    places = ["+cluster=h20x96", "cluster.partition=gpu", "++cluster.environment.A=b", "launch.notice_s=60", "launcher=slurm"]
    places += ["run_dir=x", "follow=true", "cluster_dir=y"]
    own = ["hf=/m", "layouts=[ep1]", "out=launcher=.html", "clusters=1"]
    assert split([*own, *places]) == (own, places)


@pytest.mark.parametrize("cluster", ["local", "h20x96"])
def test_the_run_folder(cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It has the layout with most ranks, and what was asked, with paths from the root; a cluster's own model has no say."""
    saved(tiny_models.qwen3_moe(), tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    layouts = "layouts=[ep1,tp2+ep2+pp2,ep2]"
    assert command.main(["hf=model", layouts, f"+cluster={cluster}", "launcher=none", "run_dir=mine", "lengths=[5,3]"]) == 0
    said = capsys.readouterr().out
    assert "Each rank runs: srun" in said
    assert f"-m rlbatch.align.job.rank --run-dir {tmp_path}/mine" in said
    config, options = load_config("mine/config.yaml"), asked(Path("mine"))
    assert (config.layout.world_size, config.layout.tp_size, config.layout.pp_size, config.layout.ep_size) == (4, 2, 2, 2)
    assert (config.model.hf, options.hf) == (str(tmp_path / "model"),) * 2
    assert (options.layouts, options.lengths) == (("ep1", "tp2+ep2+pp2", "ep2"), (5, 3))


def test_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As submit refuses; no run folder is left."""
    folder = saved(tiny_models.qwen3_moe(), tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    for places, message in (
        (["+cluster=nowhere"], "nowhere"),
        (["launcher=slurm"], "launcher=slurm: there is no sbatch on this machine."),
        (["launcher=mpi"], "launcher=mpi: there is no mpirun in PATH here."),
        (["launchr=mpi"], "launchr: unknown key. Did you mean `launcher`?"),
        (["cluster.partitions=a"], "cluster.partitions: unknown key. Did you mean `cluster.partition`"),
        (["launcher=local", "cluster.interface=none0"], "cluster.interface=none0"),
    ):
        assert command.main([f"hf={folder}", *places, "run_dir=mine"]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "mine").exists()
