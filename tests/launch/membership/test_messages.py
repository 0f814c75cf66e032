"""Who may talk to a job: guests of rank 0's port and of its store, with whatever they send."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from rlbatch.launch.membership import overseer
from rlbatch.launch.membership.messages import Handshake, Link, authenticate
from rlbatch.launch.membership.rendezvous import Meeting
from tests.launch import watched
from tests.launch.membership.test_rendezvous import HANG_S, config_of, hosts_of, join, meetings, rank_of  # noqa: F401  # a fixture

TOKEN = "0123456789abcdef"


def together(guest_token: str) -> tuple[bool, bool]:
    """Whether each side takes the other for one of its job."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = Link(socket.create_connection(server.getsockname()))
        handshake = Handshake(server.accept()[0], TOKEN, HANG_S)

    def serve() -> None:
        try:
            while not handshake.is_known:
                handshake.receive()
        except ConnectionError:
            handshake.link.close()

    thread, is_known = threading.Thread(target=serve), False
    thread.start()
    with suppress(ConnectionError):
        is_known = authenticate(link, guest_token, HANG_S)
    thread.join()
    link.close()
    handshake.link.close()
    return handshake.is_known, is_known


def test_both_prove_themselves() -> None:
    """With the same token; and nobody with another one."""
    assert together(TOKEN) == (True, True)
    assert together("another") == (False, False)
    assert together("\ud800") == (False, False)


def test_who_does_not_know_the_token_learns_and_proves_nothing() -> None:
    """A process that listens in rank 0's place is not taken for it, whatever it answers; it gets no token."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = Link(socket.create_connection(server.getsockname()))
        false = server.accept()[0]
    false.sendall(bytes(32) + bytes(32))
    assert not authenticate(link, TOKEN, HANG_S)
    assert TOKEN.encode() not in false.recv(4096)
    link.close()
    false.close()


GARBAGE = [
    b'{"token": "\\ud800"}\n',
    b"[" * 100_000 + b"\n",
    b"\xff" * 64,
    b"\n" * 64,
    b'{"rank": 1, "world_size": 2, "host": "x"}\n' * 8,
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
def test_no_guest_keeps_ranks_from_meeting(
    garbage: bytes,
    tmp_path: Path,
    meetings: list[Meeting],  # noqa: F811
    capfd: pytest.CaptureFixture[str],
) -> None:
    """What is sent without proof is never parsed: the guest is refused, and the ranks meet."""
    meetings.append(join(rank_of(0), tmp_path, config_of(), ""))
    with socket.create_connection(("127.0.0.1", meetings[0].attempt.port), HANG_S) as handshake, suppress(OSError):
        handshake.sendall(garbage)
        handshake.shutdown(socket.SHUT_WR)
        while handshake.recv(4096):
            pass
    assert "rendezvous: refused a process at 127.0.0.1: it is of another job" in capfd.readouterr().err
    meetings.append(join(rank_of(1), tmp_path, config_of(), ""))
    assert hosts_of(meetings[0]) == ["n1", "n2"]


def test_a_crowd_at_the_door(tmp_path: Path, meetings: list[Meeting], monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Those that have been there longest without proof go; a rank gets in."""
    monkeypatch.setattr(overseer, "SPARE_HANDSHAKES", 4)
    meetings.append(join(rank_of(0), tmp_path, config_of(), ""))
    crowd = [socket.create_connection(("127.0.0.1", meetings[0].attempt.port)) for _ in range(40)]
    meetings.append(join(rank_of(1), tmp_path, config_of(), ""))
    assert hosts_of(meetings[0]) == ["n1", "n2"]
    for handshake in crowd:
        handshake.close()


def test_the_port_is_closed_once_all_have_met(tmp_path: Path, meetings: list[Meeting]) -> None:  # noqa: F811
    """Nobody can connect any more, and who waited at the door is sent away."""
    meetings.append(join(rank_of(0), tmp_path, config_of(), ""))
    with socket.create_connection(("127.0.0.1", meetings[0].attempt.port), HANG_S) as handshake:
        meetings.append(join(rank_of(1), tmp_path, config_of(), ""))
        assert hosts_of(meetings[0]) == ["n1", "n2"]
        received = b""
        while part := handshake.recv(64):
            received += part
    assert len(received) == 32
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", meetings[0].attempt.port), HANG_S)


def test_strangers_at_the_store(tmp_path: Path) -> None:
    """Who came to the job's store before its ranks is put out once they have come, and nobody comes later."""
    ranks = [watched.start(tmp_path, "gloo_strangers", watched.rank_variables(rank, 2)) for rank in range(2)]
    watched.wait_for((tmp_path / "store_port").exists)
    port = int((tmp_path / "store_port").read_text())
    with socket.create_connection(("127.0.0.1", port), HANG_S) as early:
        (tmp_path / watched.GO).touch()
        assert early.recv(1) == b""
    watched.wait_for(lambda: len(list(tmp_path.glob("sealed.*"))) == 2)
    with pytest.raises(TimeoutError):
        socket.create_connection(("127.0.0.1", port), 1.0)
    (tmp_path / "end").touch()
    ended = watched.finish(ranks)
    assert ended.codes == [0, 0]
    assert "store: hung up on 127.0.0.1:" in ended.outputs[0]
    assert all("sum 2" in output for output in ended.outputs)
