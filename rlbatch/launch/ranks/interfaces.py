"""Network interfaces and the addresses of this machine."""

from __future__ import annotations

import ipaddress
import os
import socket

from rlbatch.api import ConfigError

LOOPBACK, LOOPBACK_INTERFACE = "127.0.0.1", "lo"
PORTS = range(20000, 30000)
"""Ports at which ranks of a job meet: below the range from which Linux hands ports to other connections."""
_BRIDGES = ("docker", "br-", "virbr", "veth", "cni", "flannel", "podman")
"""Interfaces that lead to containers of this machine; other machines have some of the same address."""


def addresses_of(interface: str) -> list[str]:
    """IP addresses of an interface, IPv4 first.

    Args:
        interface: Its name; of several, with commas between, all must be there and the first counts.

    Raises:
        ConfigError: there is no such interface, or it has no address; lists those that have one.
    """
    found, names = _addresses(), interface.split(",")
    for name in names:
        if name not in found:
            shown = ", ".join(f"{name} ({', '.join(addresses)})" for name, addresses in found.items())
            said = interface if len(names) == 1 else f"{interface}: `{name}`"
            raise ConfigError(
                f"cluster.interface={said}: {socket.gethostname()} has no such interface with an IP address. Use one of: {shown}."
            )
    return found[names[0]]


def reachable_addresses() -> list[str]:
    """Addresses under which other machines may reach this one, the most likely first."""
    found = _addresses()
    names = sorted(found, key=lambda name: name.startswith(_BRIDGES))  # a stable sort: else the system's order
    addresses = [address for name in names for address in found[name]]
    return [address for address in addresses if not ipaddress.ip_address(address).is_loopback]


def named_address(name: str) -> str:
    """The address of this machine to which its name, or one of its addresses as text, leads other machines; empty: there is none.

    A loopback address, which many machines have for their own name, leads nobody here.
    """
    try:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError):
        return ""
    own = reachable_addresses()
    return next((address for address in sorted(found, key=lambda address: ":" in address) if address in own), "")


def interface_of(address: str) -> str:
    """The interface that has an address; empty if none has."""
    return next((name for name, addresses in _addresses().items() if address in addresses), "")


def own_address(host: str) -> str:
    """This machine's address on the network of the job: of the interface that gloo uses, else of its name. Without one it raises
    ConfigError.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if addresses := _addresses().get(interface):
        return addresses[0]
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(
            f"cluster.interface=: {host} does not know its own address ({error.strerror}). Set it to the network between the nodes."
        ) from error


def set_interface(interface: str, *, is_chosen: bool) -> None:
    """Makes torch.distributed use an interface.

    Args:
        interface: Its name; empty: none was found.
        is_chosen: Whether the user chose it: then it is NCCL's too, and counts more than the environment. One that was found is only
            gloo's, since NCCL may use several; but where it is the loopback interface all ranks are on one node, and NCCL needs no other.
    """
    if interface and is_chosen:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface
    elif interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if interface == LOOPBACK_INTERFACE:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def shorten_name_lookups() -> None:
    """Lets a silent name server cost a second, not five, unless the environment says otherwise; before the first lookup.

    torch's store asks for the name of every peer's address, at both ends and on rank 0 one after the other, only to show it in messages
    (seen with strace in torch 2.13). The C library reads this variable (resolv.conf(5)).
    """
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")


def listen(address: str, port: int, backlog: int) -> socket.socket:
    """A listening TCP socket.

    Args:
        address: An address of this machine; empty: all of them, IPv4 and IPv6.
        port: 0: any that is free.
        backlog: Connections that may wait.

    Raises:
        OSError: the port is taken, or the address is not of this machine.
    """
    family = socket.AF_INET
    if ":" in address or (not address and socket.has_dualstack_ipv6()):
        family = socket.AF_INET6
    server = socket.socket(family, socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(bool(address)))
        server.bind((address or ("::" if family == socket.AF_INET6 else "0.0.0.0"), port))
        server.listen(backlog)
    except OSError:
        server.close()
        raise
    return server


def _addresses() -> dict[str, list[str]]:
    """IPv4, then global IPv6 addresses of each interface that is up; link-local ones need a scope and are left out."""
    import psutil  # most commands ask nothing of it

    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    found: dict[str, list[str]] = {}
    for family in (socket.AF_INET, socket.AF_INET6):
        for name, entries in psutil.net_if_addrs().items():
            addresses = [entry.address for entry in entries if entry.family == family and "%" not in entry.address and name in up]
            if addresses:
                found.setdefault(name, []).extend(addresses)
    return found
