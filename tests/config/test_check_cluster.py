"""What a cluster's keys may say."""

from __future__ import annotations

import pytest

from rlbatch.api import ConfigError
from rlbatch.config.compose import compose


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cluster.gpus_per_node=0"], "cluster.gpus_per_node=0: must be greater than 0."),
        (["cluster.storage_gbs=0"], "cluster.storage_gbs=0.0: must be 0.001 or more."),
        (["launch.notice_s=0"], "launch.notice_s=0: must be greater than 0."),
        (["launch.max_idle_requeues=-1"], "launch.max_idle_requeues=-1: must be 0 or more."),
        (["cluster.partition=' gpu'"], "cluster.partition=' gpu': must be one line without blanks at its ends."),
        (["cluster.sbatch_options=[reservation]"], "cluster.sbatch_options=[reservation]: must be options of sbatch"),
        (["cluster.sbatch_options=['--nodes=3']"], "cluster.sbatch_options=[--nodes=3]: --nodes follows from layout.world_size"),
        (["cluster.sbatch_options=['-N 3']"], "cluster.sbatch_options=[-N 3]: -N follows from layout.world_size"),
        (["cluster.sbatch_options=[-a0-3]"], "cluster.sbatch_options=[-a0-3]: -a0-3 follows from layout.world_size"),
        (["cluster.sbatch_options=['--arr=0-3']"], "cluster.sbatch_options=[--arr=0-3]: --arr follows from layout.world_size"),
        (["cluster.sbatch_options=['--mem=1G --outp=x']"], "cluster.sbatch_options=[--mem=1G --outp=x]: --outp follows from"),
        (["cluster.environment={A-B: 1}"], "cluster.environment.A-B: is no name of a variable."),
        (["cluster.environment.A-B=1"], "cluster.environment.A-B: is no name of a variable."),
        (["cluster.environment.A.B=1"], "cluster.environment.A.B: is no name of a variable."),
        (["cluster.environment.1A=x"], "cluster.environment.1A: is no name of a variable."),
        (["cluster.environment.=x"], "cluster.environment.: is no name of a variable."),
        (["cluster.environment.É=x"], "cluster.environment.É: is no name of a variable."),
        (
            ["cluster.environment.RANK=3"],
            "cluster.environment.RANK: tells each rank who it is, and is set by what starts it. Leave it out.",
        ),
        (["cluster.environment={SLURM_STEP_NUM_TASKS: 3}"], "cluster.environment.SLURM_STEP_NUM_TASKS: tells each rank who it is"),
        (["rollout.engine.environment.RLBATCH_LAUNCH=x"], "rollout.engine.environment.RLBATCH_LAUNCH: tells each rank who it is"),
        (['cluster.environment.A="a\nb"'], "cluster.environment.A='a\\nb': must be one line of printable text."),
        (
            ["cluster.environment.A=[1,2]"],
            "cluster.environment.A=[1,2]: must be text, not a list. Quote it: 'cluster.environment.A=\"[1,2]\"'.",
        ),
        (["cluster.container=docker"], "cluster.container=docker: must be `none`, `pyxis` or `apptainer`, not `docker`."),
        (["cluster.container=pyxis"], "cluster.container=pyxis: needs an image. Set cluster.container_image."),
        (["cluster.container_image=/a.sif"], "cluster.container_image=/a.sif: has an effect only with a container."),
        (
            ["cluster.container=pyxis", "cluster.container_image=a", "cluster.container_mounts=[data:/data]"],
            "cluster.container_mounts=[data:/data]: must be host:container, both from the root.",
        ),
        (
            ["cluster.container=pyxis", "cluster.container_image=a", "cluster.container_mounts=['/a,b:/a']"],
            "cluster.container_mounts=[/a,b:/a]: must have no comma, which separates mounts.",
        ),
        (["cluster.exclusive=false"], "cluster.exclusive=false: then Slurm gives a rank one CPU, unless cluster.cpus_per_task says more."),
        (["cluster.interface=^docker"], "cluster.interface=^docker: must be the name of an interface, or several with commas between"),
        (["cluster.interface==eth0"], "cluster.interface==eth0: must be the name of an interface"),
        (["cluster.interface=eth0,"], "cluster.interface=eth0,: must be the name of an interface"),
        (["launcher=ray"], "launcher=ray: must be `local`, `slurm`, `mpi` or `none`, not `ray`."),
    ],
)
def test_refused_keys(overrides: list[str], message: str) -> None:
    """A value that would make another batch script, environment or container than it says is refused by its key."""
    with pytest.raises(ConfigError) as caught:
        compose(overrides)
    assert str(caught.value).startswith(message)


def test_variables_of_any_name() -> None:
    """`cluster.environment.<NAME>` is a key; both files and command line count."""
    config = compose(["+cluster=h20x8", "cluster.environment.NCCL_IB_HCA=mlx5", "cluster.environment.OMP_NUM_THREADS=24"])
    assert config.cluster.environment == {"OMP_NUM_THREADS": "24", "NCCL_IB_HCA": "mlx5"}


def test_several_interfaces() -> None:
    """NCCL and gloo take lists."""
    assert compose(["cluster.interface=ib0,ib1"]).cluster.interface == "ib0,ib1"
