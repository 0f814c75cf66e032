"""How the ranks of a job meet, and whom they refuse."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rlbatch.api import ConfigError, LaunchError
from rlbatch.config.machines import ClusterConfig, LaunchConfig
from rlbatch.config.schema import Config
from rlbatch.launch.membership import rendezvous
from rlbatch.launch.membership.rendezvous import Meeting, first_port, join
from rlbatch.launch.ranks.interfaces import addresses_of, interface_of, listen, named_address, reachable_addresses, set_interface
from rlbatch.launch.ranks.rank_info import RankInfo
from rlbatch.launch.records.attempt import Attempt, is_superseded, read_attempt, write_attempt
from rlbatch.launch.records.failures import FirstError, claim, read_first_error
from rlbatch.launch.records.ownership import ATTEMPT_LOCK, Lock, run_folder_lock
from tests.launch import watched
from tests.listeners import listening

HANG_S = 60.0
"""Well above what anything here takes: a busy machine must not fail the test, a hang must."""


def rank_of(rank: int, world_size: int = 2, **fields: object) -> RankInfo:
    nodes = tuple(f"n{number + 1}" for number in range(world_size))
    return replace(RankInfo(rank, world_size, 0, 1, rank, f"n{rank + 1}", nodes=nodes, job_id="4711"), **fields)  # type: ignore[arg-type]


def config_of(timeout_s: float = HANG_S, interface: str = "lo") -> Config:
    return Config(launch=LaunchConfig(rendezvous_timeout_s=timeout_s), cluster=ClusterConfig(interface=interface))


@pytest.fixture
def meetings() -> Iterator[list[Meeting]]:
    """Meetings whose links are closed at the end, as by processes that end."""
    made: list[Meeting] = []
    yield made
    for meeting in made:
        if meeting.overseer:
            meeting.overseer.has_met = True  # nobody else will come
        meeting.link.send({"left": ""})
        meeting.link.close()
        if meeting.store_socket:
            meeting.store_socket.close()


def hosts_of(meeting: Meeting) -> list[str]:
    """What the overseer tells once all ranks have come."""
    until = time.monotonic() + HANG_S
    while time.monotonic() < until:
        for message in meeting.link.receive():
            if "hosts" in message:
                return list(message["hosts"])
    raise TimeoutError


def test_ranks_meet(tmp_path: Path, meetings: list[Meeting]) -> None:
    """Every rank gets all ranks' hosts, the store's address and port, and the interface that leads to rank 0."""
    meetings += [join(rank_of(rank), tmp_path, config_of(), "") for rank in range(2)]
    for meeting in meetings:
        assert hosts_of(meeting) == ["n1", "n2"]
        assert (meeting.info.master_addr, meeting.interface) == ("127.0.0.1", "lo")
    assert meetings[0].store_socket is not None
    assert {meeting.info.master_port for meeting in meetings} == {meetings[0].store_socket.getsockname()[1]}
    attempt = read_attempt(tmp_path)
    assert attempt is not None
    assert (attempt.job_id, attempt.restart_count, attempt.host, attempt.addresses) == ("4711", 0, "n1", ("127.0.0.1",))
    assert (tmp_path / "attempt.json").stat().st_mode & 0o077 == 0


def test_named_address_without_interface(tmp_path: Path, meetings: list[Meeting]) -> None:
    """Several nodes without cluster.interface: rank 0 listens at the address that its launcher's name for it leads to, and at no other."""
    address = reachable_addresses()[0]
    config = config_of(interface="")
    meetings.append(join(rank_of(0, master_addr=address), tmp_path, config, ""))
    assert meetings[0].attempt.addresses == (address,)
    port, store_port = meetings[0].attempt.port, meetings[0].info.master_port

    def listens() -> set[str]:
        found = {where.partition(" of ")[0] for where in listening([os.getpid()], lambda each: True)}
        return {where for where in found if int(where.rpartition(":")[2]) in (port, store_port)}

    assert listens() == {f"{address}:{port}", f"{address}:{store_port}"}
    meetings.append(join(rank_of(1, master_addr=address), tmp_path, config, ""))
    assert hosts_of(meetings[1]) == ["n1", "n2"]
    assert meetings[1].info.master_addr == address
    assert listens() == {f"{address}:{store_port}"}  # nobody else comes


def test_names_that_lead_elsewhere() -> None:
    """To other machines, to a loopback address, as many machines' own names do, or nowhere: none is an address to listen at."""
    assert [named_address(name) for name in ("192.0.2.199", "127.0.0.1", "::1", "no-such-host.invalid", "a" * 70, "")] == [""] * 6


def test_addresses_without_interface(tmp_path: Path, meetings: list[Meeting], capfd: pytest.CaptureFixture[str]) -> None:
    """Where no such name leads to rank 0 it tells all its addresses, the others take the first that leads to it, and a line says so."""
    meetings += [join(rank_of(rank, master_addr="no-such-host.invalid"), tmp_path, config_of(interface=""), "") for rank in range(2)]
    assert hosts_of(meetings[1]) == ["n1", "n2"]
    assert meetings[1].attempt.addresses[0] == "no-such-host.invalid"
    assert "127.0.0.1" in meetings[1].attempt.addresses
    assert meetings[1].info.master_addr != "no-such-host.invalid"
    why = "no-such-host.invalid and n1 lead to no address of it. Set it to the network between the nodes."
    assert capfd.readouterr().err.count(f"cluster.interface=: rank 0 listens at all addresses of n1, since {why}") == 1


def test_ipv6(tmp_path: Path, meetings: list[Meeting], monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses may be IPv6."""
    monkeypatch.setattr(rendezvous, "_candidates", lambda info, interface: ["::1"])
    meetings += [join(rank_of(rank), tmp_path, config_of(), "") for rank in range(2)]
    assert hosts_of(meetings[1]) == ["n1", "n2"]
    assert meetings[1].info.init_method() == f"tcp://[::1]:{meetings[1].info.master_port}"
    assert meetings[1].link.local_address() == "::1"


def test_port_of_a_job() -> None:
    """The first port that is tried follows from job and restart, and is outside the range that Linux gives to other connections."""
    assert first_port("4711", 0) == 24711
    assert first_port("4711", 2) == 24713
    assert first_port("123456.pbs1", 0) == 23456
    assert first_port("prterun-n1-42@1", 0) == first_port("prterun-n1-42@1", 0)
    assert all(20000 <= first_port(job, 0) < 30000 for job in ("", "prterun-n1-42@1", "9999999"))


def test_two_jobs_race_for_one_port(tmp_path: Path) -> None:
    """Jobs that were told the same port both meet: the later one takes the next while the first one's ranks come."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    folders = [tmp_path / "a", tmp_path / "b"]
    ranks = []
    for folder in folders:
        folder.mkdir()
        ranks += [watched.start(folder, "succeed_later", {**watched.rank_variables(rank, 2), **address}) for rank in range(2)]
    watched.wait_for(lambda: all(read_attempt(folder) for folder in folders))  # both hold their ports now
    for folder in folders:
        (folder / watched.GO).touch()
    ended = watched.finish(ranks)
    assert ended.codes == [0] * 4
    ports = [output.split("port ")[1].split()[0] for output in ended.outputs]
    assert (ports[0], ports[2]) == (ports[1], ports[3])  # once the first job has met its port is free again


def test_rank_of_another_job_is_refused(tmp_path: Path, meetings: list[Meeting], capfd: pytest.CaptureFixture[str]) -> None:
    """A rank that reaches another job's port is told so, and that job goes on to meet."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    theirs.mkdir()
    meetings.append(join(rank_of(0), theirs, config_of(), ""))
    attempt = read_attempt(theirs)
    assert attempt is not None
    write_attempt(ours, replace(attempt, token="of an earlier attempt", job_id="4712"))
    with pytest.raises(LaunchError, match=r"_timeout_s=1: .* cannot join it \(127.0.0.1: who answers there does not know this job's token"):
        join(rank_of(1, job_id="4712"), ours, config_of(1.0), "")
    assert "rendezvous: refused a process at 127.0.0.1: it is of another job" in capfd.readouterr().err
    meetings.append(join(rank_of(1), theirs, config_of(), ""))
    assert hosts_of(meetings[0]) == ["n1", "n2"]


def test_old_life_is_waited_out(tmp_path: Path, meetings: list[Meeting]) -> None:
    """A rank that finds the file of an earlier attempt waits for rank 0 to write the new one."""
    write_attempt(tmp_path, Attempt("4711", 0, "", 2, "old", "n1", ("127.0.0.1",), 1, 1))
    later = [rank_of(rank, restart_count=1) for rank in range(2)]
    waiting = threading.Thread(target=lambda: meetings.append(join(later[1], tmp_path, config_of(), "")))
    waiting.start()
    time.sleep(0.3)
    assert not meetings
    meetings.append(join(later[0], tmp_path, config_of(), ""))
    waiting.join(HANG_S)
    assert hosts_of(meetings[0]) == ["n1", "n2"]


def test_words_come_before_job_ids(tmp_path: Path, meetings: list[Meeting]) -> None:
    """Where the launcher gave a word, job ids may differ: mpirun over ssh carries the batch system's to some nodes only."""
    meetings += [join(rank_of(rank, job_id=job), tmp_path, config_of(), "word") for rank, job in enumerate(("4711", ""))]
    assert hosts_of(meetings[1]) == ["n1", "n2"]
    with pytest.raises(LaunchError, match=r"rank 0 \(host n1\) did not come: .*attempt.json is of job 4711, this rank of job 4711\."):
        join(rank_of(1), tmp_path, config_of(0.1), "another")


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    """A time-out names the ranks that did not come, with their hosts, on every rank and in first_error.json."""
    variables = {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        watched.TOGETHER: "2",
    }
    places = [{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0", "SLURMD_NODENAME": "n1"} for rank in range(2)]
    ranks = [watched.start(tmp_path, "succeed", {**variables, **place}, "600", "2") for place in places]
    ended = watched.finish(ranks)
    assert ended.codes == [1, 1]
    error = read_first_error(tmp_path)
    assert error is not None
    expected = "launch.rendezvous_timeout_s=2: 2 of 4 ranks did not come: rank 2 (host n2), rank 3 (host n2). No rank came from n2. See "
    assert error.message.startswith(expected)
    assert "".join(ended.outputs).count(expected) == 1


def test_rank_0_does_not_come(tmp_path: Path) -> None:
    """Without rank 0 the others say where it should run, and what to look at."""
    with pytest.raises(LaunchError, match=r"rendezvous_timeout_s=0.1: rank 0 \(host n1\) did not come: it wrote no attempt.json into "):
        join(rank_of(1), tmp_path, config_of(0.1), "")


def test_rank_0_cannot_be_reached(tmp_path: Path) -> None:
    """The error says which addresses were tried, what happened, and which key to set."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody else can listen there
        port = closed.getsockname()[1]
        write_attempt(tmp_path, Attempt("4711", 0, "", 2, "token", "n1", ("127.0.0.1", "::1"), port, 1))
        with pytest.raises(
            LaunchError, match=rf"rank 0 listens on n1, port {port}, and n2 cannot join it \(127.0.0.1: Connection refused; ::1: "
        ) as caught:
            join(rank_of(1), tmp_path, config_of(0.1), "")
    assert str(caught.value).endswith("Set cluster.interface to the network between the nodes.")


@pytest.mark.parametrize(
    ("rank", "world_size", "reason"), [(0, 2, "has a rank 0 already, on n1"), (1, 3, "has 2 ranks, this process is rank 1 of 3")]
)
def test_faulty_ranks_are_refused_for_good(
    tmp_path: Path, meetings: list[Meeting], rank: int, world_size: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that is there already, or of another world size, does not wait for the time-out."""
    meetings.append(join(rank_of(0), tmp_path, config_of(), ""))
    monkeypatch.setattr(rendezvous, "_open", lambda *arguments: (None, None))
    with pytest.raises(LaunchError, match=f"^rendezvous: .*{reason}.*start each with its own run_dir"):
        join(rank_of(rank, world_size), tmp_path, config_of(), "")


def test_unknown_interface(tmp_path: Path) -> None:
    """Refused with the interfaces that there are."""
    with pytest.raises(ConfigError, match=r"^cluster.interface=bond7: .* has no such interface .* Use one of: .*lo \(127.0.0.1"):
        join(rank_of(1), tmp_path, config_of(interface="bond7"), "")


def test_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interface that the user chose is gloo's and NCCL's; one that was found is gloo's, unless the environment says another; loopback is
    NCCL's too.
    """
    assert addresses_of("lo")[0] == addresses_of("lo,lo")[0] == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"^cluster\.interface=lo,none: `none`: .* has no such interface with an IP address\."):
        addresses_of("lo,none")
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.99") == ""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "ib0")
    set_interface("eth7", is_chosen=False)
    assert rendezvous.os.environ["GLOO_SOCKET_IFNAME"] == "ib0"
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    set_interface("eth7", is_chosen=False)
    assert "NCCL_SOCKET_IFNAME" not in rendezvous.os.environ
    set_interface("lo", is_chosen=False)
    assert rendezvous.os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    set_interface("eth7", is_chosen=True)
    assert {rendezvous.os.environ[name] for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")} == {"eth7"}


def test_second_job_in_a_run_folder(tmp_path: Path, meetings: list[Meeting], monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused while the first job's rank 0 lives, also by submit; a lock that outlives nobody."""
    monkeypatch.setattr(rendezvous, "HANDOVER_S", 0.0)
    meetings.append(join(rank_of(0), tmp_path, config_of(), ""))
    with pytest.raises(ConfigError, match=r"^run_dir=.*: job 4711, with rank 0 on n1, process \d+, is running in it\. Wait for its end"):
        join(rank_of(0, job_id="4712"), tmp_path, config_of(), "")
    with pytest.raises(ConfigError, match=r"^run_dir=.*: the ranks of another job run in it"), run_folder_lock(tmp_path):
        pass
    attempt = read_attempt(tmp_path)
    assert attempt is not None
    assert not is_superseded(tmp_path, attempt.token)


def test_lock_ends_with_its_process(tmp_path: Path) -> None:
    """Also with one that is killed."""
    hold = (
        "from rlbatch.launch.records.ownership import *; "
        f"lock = Lock(Path({str(tmp_path / ATTEMPT_LOCK)!r})); print(lock.try_for(0), flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        lock = Lock(tmp_path / ATTEMPT_LOCK)
        assert not lock.try_for(0.0)
        holder.kill()
    assert lock.try_for(5.0)
    lock.release()


def test_requeued_job_takes_over(tmp_path: Path) -> None:
    """What still runs of a job's earlier attempt ends when the next attempt begins, which then has the folder."""
    slurm = {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_STEP_TASKS_PER_NODE": "1",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
    }
    zombie = watched.start(tmp_path, "sleep", slurm)
    watched.wait_for((tmp_path / "attempt.json").exists)
    late = watched.start(tmp_path, "succeed", {**slurm, "SLURM_RESTART_COUNT": "1"})
    ended = watched.finish([late, zombie])
    assert ended.codes == [0, 1]
    assert "superseded" in ended.outputs[1]
    attempt = read_attempt(tmp_path)
    assert attempt is not None
    assert attempt.restart_count == 1


def test_earlier_failure_is_forgotten(tmp_path: Path, meetings: list[Meeting]) -> None:
    """An attempt starts without the first error of the one before; what one of its own ranks recorded meanwhile stays, and ends it."""
    claim(tmp_path, FirstError(1, "n2", "Exit", "long ago", "", time.time() - 86400))
    meetings.append(join(rank_of(0), tmp_path, config_of(), ""))
    assert read_first_error(tmp_path) is None
    claim(tmp_path, FirstError(1, "n2", "ConfigError", "just now", "", time.time()))
    until = time.monotonic() + HANG_S
    heard: list[object] = []
    while not heard and time.monotonic() < until:
        heard += [message["end"] for message in meetings[0].link.receive() if "end" in message]
    assert heard == ["[rank 1 host n2] just now"]


def test_port_that_is_taken_is_not_shared() -> None:
    """Two sockets do not listen at one port, so the second job moves on."""
    with listen("127.0.0.1", 0, 1) as first, pytest.raises(OSError, match="in use"):
        listen("", first.getsockname()[1], 1)


def test_table_of_ranks(tmp_path: Path) -> None:
    """The command without torch: every rank prints the same checksum, rank 0 the hosts."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "rlbatch.launch.membership.check_rendezvous", "--run-dir", str(tmp_path)],
            env={**rendezvous.os.environ, **watched.rank_variables(rank, 8, 4)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(8)
    ]
    ended = watched.finish(ranks)
    assert ended.codes == [0] * 8
    host = socket.gethostname()
    assert ended.outputs[0].splitlines()[0] == f"{host}: ranks 0-7"
    assert f"rank 5 of 8: host {host}, local rank 1 of 4, node 1: table " in ended.outputs[5]
    assert len({output.rpartition(" ")[2] for output in ended.outputs}) == 1
