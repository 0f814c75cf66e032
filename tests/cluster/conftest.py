"""One Slurm and one set of ssh hosts for all tests here: they start in a second each, and are gone without a trace at the end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster import slurm as slurm_daemons
from tests.cluster import ssh_hosts as hosts_with_sshd
from tests.cluster.hosts import unused_prefix
from tests.cluster.jobs import RUN_S
from tests.cluster.processes import require, wait_until
from tests.cluster.slurm import Slurm, running_slurm
from tests.cluster.ssh_hosts import SshHosts, running_ssh_hosts
from tests.leftovers import no_memory_left
from tests.stopwatch import Stopwatch

GONE_S = 15.0
"""After a job, for its last processes to end."""


@pytest.fixture(scope="session")
def slurm_session() -> Iterator[Slurm]:
    """A Slurm of 4 nodes."""
    require(*slurm_daemons.PROGRAMS)
    with running_slurm(4, unused_prefix("n")) as slurm:
        yield slurm


@pytest.fixture
def slurm(slurm_session: Slurm) -> Iterator[Slurm]:
    """The session's Slurm of 4 nodes, idle before and after; a job may leave no process and no shared memory."""
    with no_memory_left():
        yield slurm_session
        slurm_session.run("scancel", "--user=root", check=False)
        watch = Stopwatch()
        wait_until(lambda: not slurm_session.job_processes(), RUN_S, f"the end of {slurm_session.job_processes()}")
        watch.assert_within(GONE_S)
    slurm_session.wait_until_idle()


@pytest.fixture(scope="module")
def large_slurm() -> Iterator[Slurm]:
    """A Slurm of 64 nodes with 8 (pretended) GPUs each."""
    require(*slurm_daemons.PROGRAMS)
    with running_slurm(64, unused_prefix("w")) as slurm:
        yield slurm


@pytest.fixture(scope="session")
def ssh_hosts() -> Iterator[SshHosts]:
    """Three hosts with sshd."""
    require(*hosts_with_sshd.PROGRAMS)
    with running_ssh_hosts(3, unused_prefix("h")) as hosts:
        yield hosts
