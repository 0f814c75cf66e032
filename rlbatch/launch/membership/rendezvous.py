"""Lets the ranks of a job meet: through ``attempt.json`` in the run folder, which all of them see, at rank 0's address.

Rank 0 listens, at a port that follows from the job id, and writes where. The others read that and prove with its token that they
are of the same attempt of the same job; a rank that ends up elsewhere, because a file is old or a port is another job's, is refused and
looks again.
Needs no torch.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rlbatch.api import ConfigError, LaunchError
from rlbatch.config.schema import Config
from rlbatch.launch.membership.messages import Link, Message, authenticate
from rlbatch.launch.membership.overseer import Overseer
from rlbatch.launch.membership.store_port import StorePort
from rlbatch.launch.ranks.interfaces import (
    LOOPBACK,
    PORTS,
    addresses_of,
    interface_of,
    listen,
    named_address,
    reachable_addresses,
    shorten_name_lookups,
)
from rlbatch.launch.ranks.rank_info import RankInfo
from rlbatch.launch.ranks.variables import LAUNCH_VARIABLE
from rlbatch.launch.records.attempt import Attempt, name_of, new_attempt, read_attempt, write_attempt
from rlbatch.launch.records.failures import FIRST_ERROR, is_earlier, read_first_error
from rlbatch.launch.records.ownership import ATTEMPT_LOCK, Lock

MAX_PROBES = 64
"""Ports in a row that are tried."""
CONNECT_S = 3.0
"""Longest wait for an address to answer."""
REPLY_S = 10.0
"""Longest wait for rank 0's word; it may be held up by an import."""
UNAUTHENTICATED = "who answers there does not know this job's token: another job, another attempt of this one, or another service"
HANDOVER_S = 5.0
"""Longest wait for an earlier job's last process to end."""


@dataclass(frozen=True)
class Meeting:
    """A rank's way into its job.

    Attributes:
        info: This rank, with the address and port of the job's store.
        attempt: The job's attempt.
        link: The link to rank 0's overseer.
        overseer: The overseer, on rank 0.
        store_socket: The socket at which the store will listen, on rank 0.
        interface: The network interface that leads to the other ranks.
    """

    info: RankInfo
    attempt: Attempt
    link: Link
    overseer: Overseer | None
    store_socket: socket.socket | None
    interface: str


def join(info: RankInfo, run_dir: Path, config: Config, launch: str) -> Meeting:
    """Finds rank 0, or is it; returns when this rank has joined, maybe before the others.

    Raises:
        ConfigError: there is no such interface.
        LaunchError: rank 0 did not come, cannot be reached, or refused this rank.
    """
    shorten_name_lookups()
    timeout_s, interface = config.launch.rendezvous_timeout_s, config.cluster.interface
    if interface:
        addresses_of(interface)  # on every rank: names the node that lacks it
    overseer = store_socket = None
    if info.rank == 0:
        overseer, store_socket = _open(info, run_dir, config, launch)
    attempt, link, address, store_port = _find(info, run_dir, timeout_s, launch)
    if overseer:
        address = attempt.addresses[0]
    interface = interface or interface_of(link.local_address())
    return Meeting(replace(info, master_addr=address, master_port=store_port), attempt, link, overseer, store_socket, interface)


def launch_id() -> str:
    """The id that the launcher gave this start; empty if it gave none."""
    return os.environ.get(LAUNCH_VARIABLE, "")


def _open(info: RankInfo, run_dir: Path, config: Config, launch: str) -> tuple[Overseer, socket.socket]:
    """Rank 0: listens, and takes the run folder over."""
    addresses = _candidates(info, config.cluster.interface)
    bound = addresses[0] if len(addresses) == 1 else ""
    lock = Lock(run_dir / ATTEMPT_LOCK)
    is_free = lock.try_for(HANDOVER_S)
    previous = None if is_free else read_attempt(run_dir)
    if not is_free and not (previous and previous.is_earlier_of(info)):
        who = f"{name_of(previous)}, with rank 0 on {previous.host}, process {previous.pid}," if previous else "another job"
        raise ConfigError(f"run_dir={run_dir}: {who} is running in it. Wait for its end, or choose another.")
    server = _probe(info, bound)
    store_socket = listen(bound, 0, info.world_size + 16)
    attempt = new_attempt(info, launch, addresses, server.getsockname()[1])
    _forget_earlier_failure(run_dir)
    write_attempt(run_dir, attempt)
    if previous and not lock.try_for(config.launch.rendezvous_timeout_s):  # what is left of that attempt sees the new token, and ends
        raise LaunchError(f"run_dir={run_dir}: {name_of(previous)} does not end. Kill process {previous.pid} on {previous.host}.")
    overseer = Overseer(server, attempt, info, run_dir, StorePort(store_socket), config.launch)
    overseer.start()
    return overseer, store_socket


def _candidates(info: RankInfo, interface: str) -> list[str]:
    """Lists where rank 0 may be reached, the most likely address first: the others take the first one that leads to it.

    One address: rank 0 listens there alone. Several: at all addresses of its machine; a wrong one does no harm, because who answers there
    does not know the token.
    """
    if interface:
        return addresses_of(interface)[:1]
    if info.local_size == info.world_size:
        return [LOOPBACK]
    given = [name for name in (info.master_addr, *info.nodes[:1]) if name]
    for name in given:
        if address := named_address(name):
            return [address]
    why = f"{' and '.join(given)} lead to no address of it" if given else "its launcher does not say by which address the others reach it"
    print(
        f"cluster.interface=: rank 0 listens at all addresses of {info.host}, since {why}. Set it to the network between the nodes.",
        file=sys.stderr,
        flush=True,
    )
    return list(dict.fromkeys([*given[:1], *reachable_addresses(), *given, info.host, LOOPBACK]))


def _probe(info: RankInfo, address: str) -> socket.socket:
    """Listens at the first free port from the one that follows from job and restart."""
    first = info.master_port or first_port(info.job_id, info.restart_count)
    for port in range(first, first + MAX_PROBES):
        with suppress(OSError, OverflowError):
            return listen(address, port, info.world_size + 16)
    with suppress(OSError):
        return listen(address, 0, info.world_size + 16)
    raise LaunchError(f"rendezvous: cannot listen on {address or 'any address'} of {info.host}. Is cluster.interface right?")


def first_port(job_id: str, restart_count: int) -> int:
    """Port at which rank 0 tries to listen first: jobs on one node mostly differ in it, and so do attempts of a job."""
    digits = re.match("[0-9]+", job_id)
    number = int(digits[0]) if digits else zlib.crc32(job_id.encode()) if job_id else os.getpid()
    return PORTS[(number + restart_count) % len(PORTS)]


def _forget_earlier_failure(run_dir: Path) -> None:
    """Removes the first error of an earlier attempt; one of this attempt may be there already."""
    recorded = read_first_error(run_dir)
    if recorded and is_earlier(recorded):
        (run_dir / FIRST_ERROR).unlink(missing_ok=True)


def _find(info: RankInfo, run_dir: Path, timeout_s: float, launch: str) -> tuple[Attempt, Link, str, int]:
    """Reads where rank 0 is, until it answers there; returns its attempt, the link, the address that led to it, and the store's port."""
    until, pause_s, trouble = time.monotonic() + timeout_s, 0.02, ""
    while True:
        attempt = read_attempt(run_dir)
        if attempt is None:
            trouble = f"rank 0{_on(info)} did not come: it wrote no attempt.json into {run_dir}. Do all nodes see the run folder?"
        elif not attempt.is_of(info, launch):
            trouble = f"rank 0{_on(info)} did not come: {run_dir / 'attempt.json'} is of {name_of(attempt)}, this rank of {name_of(info)}."
        else:
            tried = []
            for address in attempt.addresses:
                reply = _ask(address, attempt, info)
                if isinstance(reply, tuple):
                    return attempt, reply[0], address, int(reply[1]["store_port"])
                tried.append(f"{address}: {reply}")
            trouble = (
                f"rank 0 listens on {attempt.host}, port {attempt.port}, and {info.host} cannot join it ({'; '.join(tried)}). "
                "Set cluster.interface to the network between the nodes."
            )
        if time.monotonic() > until:
            raise LaunchError(f"launch.rendezvous_timeout_s={timeout_s:g}: {trouble}")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.5)


def _ask(address: str, attempt: Attempt, info: RankInfo) -> tuple[Link, Message] | str:
    """Tries to join at an address; returns the link with rank 0's answer, or why not. Raises LaunchError if rank 0 refused this rank for
    good.
    """
    try:
        link = Link(socket.create_connection((address, attempt.port), CONNECT_S))
    except OSError as error:
        return error.strerror or str(error)
    until = time.monotonic() + REPLY_S
    try:
        if not authenticate(link, attempt.token, REPLY_S):
            link.close()
            return UNAUTHENTICATED
        link.send({"rank": info.rank, "world_size": info.world_size, "host": info.host})
        while time.monotonic() < until:
            messages = link.receive()
            if not messages:
                continue
            if messages[0].get("joined"):
                link.unread(messages[1:])
                return link, messages[0]
            link.close()
            if messages[0].get("final"):
                raise LaunchError(f"rendezvous: {messages[0]['refused']}. One job a run folder; start each with its own run_dir.")
            return str(messages[0].get("refused", UNAUTHENTICATED))
    except ConnectionError as error:
        link.close()
        return f"{UNAUTHENTICATED}, or rank 0 ended ({error})"
    link.close()
    return f"no answer within {REPLY_S:g} s"


def _on(info: RankInfo) -> str:
    return f" (host {info.nodes[0]})" if info.nodes else ""
