"""Hosts that are reached over real ssh, on one machine: network namespaces, each with its own address, host name and sshd.

``python -m tests.cluster.ssh_hosts 3`` keeps them up by hand, until Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.cluster.hosts import add_hosts, remove_hosts
from tests.cluster.processes import pids_of, public_folder, stop, wait_until

PROGRAMS = ("sshd", "ssh", "ssh-keygen", "ip", "unshare")
BRIDGE = "rlbatch0"
NETWORK = "10.77.53"
START_S = 30.0

SSHD_CONFIG = """\
ListenAddress {address}
HostKey {folder}/host_key
PidFile {folder}/sshd.{name}.pid
AuthorizedKeysFile {folder}/key.pub
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
MaxStartups 100
"""

SSH_CONFIG = """\
User root
IdentityFile {folder}/key
IdentitiesOnly yes
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
"""


class SshHosts:
    """Running hosts.

    Attributes:
        folder: Keys, configs, pidfiles.
        names: Their host names. Others reach them, and they each other, by these.
        head: The address of this machine that the hosts reach.
        environment: Variables with which ``ssh NAME`` logs in without a question.
    """

    def __init__(self, folder: Path, hosts: int, prefix: str) -> None:
        """Args:
        folder: Empty, owned by root.
        hosts: How many.
        prefix: Start of their names; then comes the number, from 1.
        """
        self.folder = folder
        self.names = [f"{prefix}{number}" for number in range(1, hosts + 1)]
        self.head = f"{NETWORK}.1"
        self.environment = {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}"}

    def start(self) -> None:
        """Starts the hosts and waits until they can be logged in to."""
        self._write_files()
        add_hosts(str(self.folder), dict(zip(self.names, map(_address, range(len(self.names))), strict=True)))
        _run("ip", "link", "add", BRIDGE, "type", "bridge")
        _run("ip", "address", "add", f"{self.head}/24", "dev", BRIDGE)
        _run("ip", "link", "set", BRIDGE, "up")
        for index, name in enumerate(self.names):
            self._start_host(name, _address(index))
        for name in self.names:
            wait_until(lambda name=name: self._answers(name), START_S, f"ssh {name}")  # type: ignore[misc]

    def stop(self) -> None:
        """Ends every process on the hosts, and removes their network and their lines in /etc/hosts."""
        stop(pids_of(self.folder.glob("sshd.*.pid")), grace_s=2)
        stop(self.processes(), grace_s=1)
        for name in self.names:
            _run("ip", "netns", "delete", name, check=False)
        _run("ip", "link", "delete", BRIDGE, check=False)
        remove_hosts(str(self.folder))

    def processes(self) -> list[int]:
        """Processes on the hosts, sshd among them."""
        return [int(pid) for name in self.names for pid in _run("ip", "netns", "pids", name, check=False).split()]

    def _write_files(self) -> None:
        for key in ("key", "host_key"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / key))
        (self.folder / "ssh_config").write_text(SSH_CONFIG.format(folder=self.folder))
        shim = self.folder / "bin" / "ssh"
        shim.parent.mkdir()
        shim.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.folder}/ssh_config "$@"\n')
        shim.chmod(0o755)
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd insists

    def _start_host(self, name: str, address: str) -> None:
        config = self.folder / f"sshd.{name}.conf"
        config.write_text(SSHD_CONFIG.format(folder=self.folder, name=name, address=address))
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", f"{BRIDGE}-{name}", "type", "veth", "peer", "name", "eth0", "netns", name)
        _run("ip", "link", "set", f"{BRIDGE}-{name}", "master", BRIDGE, "up")
        _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
        for interface in ("lo", "eth0"):
            _run("ip", "-n", name, "link", "set", interface, "up")
        sshd = f"hostname {name}; exec {shutil.which('sshd')} -f {config} -E {self.folder}/sshd.{name}.log"
        _run("ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", sshd)

    def _answers(self, name: str) -> bool:
        return subprocess.run(["ssh", name, "true"], env=self.environment, stdin=subprocess.DEVNULL, capture_output=True).returncode == 0


@contextmanager
def running_ssh_hosts(hosts: int, prefix: str = "h") -> Iterator[SshHosts]:
    """Hosts with their own folder, gone at the end."""
    with public_folder("rlbatch-ssh-") as folder:
        machines = SshHosts(folder, hosts, prefix)
        try:
            machines.start()
            yield machines
        finally:
            machines.stop()


def _address(index: int) -> str:
    return f"{NETWORK}.{11 + index}"


def _run(*command: str, check: bool = True) -> str:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=START_S)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> None:
    """Keeps hosts up until it is interrupted."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.ssh_hosts", description="Hosts with sshd on this machine, until Ctrl-C.")
    parser.add_argument("hosts", type=int, nargs="?", default=3, help="how many (3)")
    parser.add_argument("--prefix", default="h", help="start of their names (h)")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt), running_ssh_hosts(arguments.hosts, arguments.prefix) as machines:
        print(f"export PATH={machines.folder}/bin:$PATH", flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
