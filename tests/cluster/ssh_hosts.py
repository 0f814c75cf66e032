"""Hosts that are reached over real ssh, on one machine: network namespaces, each with its own address, host name and sshd.

``python -m tests.cluster.ssh_hosts 3`` keeps them up by hand, until Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.cluster.hosts import add_hosts, remove_hosts
from tests.cluster.processes import is_alive, pids_of, public_folder, stop, wait_until

PROGRAMS = ("sshd", "ssh", "ssh-keygen", "ip", "unshare")
NETWORKS = 100
"""Sets of hosts that can be up at once: bridge ``rlb7`` has the network 10.77.7.0/24."""
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
        names: Their host names. This machine reaches them, and they each other, by these.
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
        self._network: int | None = None
        self.environment = {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}"}

    def start(self) -> None:
        """Starts the hosts and waits until they can be logged in to."""
        self._write_files()
        self._network = _add_bridge()
        addresses = {name: f"10.77.{self._network}.{11 + index}" for index, name in enumerate(self.names)}
        add_hosts(str(self.folder), addresses)
        for name, address in addresses.items():
            self._start_host(name, address, f"rlb{self._network}")
        for name in self.names:
            wait_until(lambda name=name: self._answers(name), START_S, f"ssh {name}")  # type: ignore[misc]

    def stop(self) -> None:
        """Ends every process on the hosts, and removes their network and their lines in /etc/hosts."""
        stop(pids_of(self.folder.glob("sshd.*.pid")), grace_s=2)
        stop(self.processes(), grace_s=1)
        if self._network is not None:
            for name in self.names:
                _run("ip", "netns", "delete", name, check=False)
            _run("ip", "link", "delete", f"rlb{self._network}", check=False)
        remove_hosts(str(self.folder))

    def start_command(self, name: str, command: str, cwd: Path, **variables: str) -> subprocess.Popen[str]:
        """Starts a shell command on a host, over ssh, as a user who has logged in there.

        Args:
            name: The host.
            command: For its shell.
            cwd: Working folder.
            variables: Environment of the command; others are the host's own. ``ssh`` works from there too.
        """
        variables = {"PATH": self.environment["PATH"], **variables}
        line = f"cd {shlex.quote(str(cwd))} && env {shlex.join(f'{key}={value}' for key, value in variables.items())} {command}"
        return subprocess.Popen(
            ["ssh", name, line],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def job_processes(self) -> list[int]:
        """Processes on the hosts that are not sshd's own."""
        return [pid for pid in self.processes() if not _is_sshd(pid) and is_alive(pid)]

    def processes(self) -> list[int]:
        """All processes on the hosts."""
        names = self.names if self._network is not None else []
        return [int(pid) for name in names for pid in _run("ip", "netns", "pids", name, check=False).split()]

    def _write_files(self) -> None:
        for key in ("key", "host_key"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / key))
        (self.folder / "ssh_config").write_text(SSH_CONFIG.format(folder=self.folder))
        shim = self.folder / "bin" / "ssh"
        shim.parent.mkdir()
        shim.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.folder}/ssh_config "$@"\n')
        shim.chmod(0o755)
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd insists

    def _start_host(self, name: str, address: str, bridge: str) -> None:
        config = self.folder / f"sshd.{name}.conf"
        config.write_text(SSHD_CONFIG.format(folder=self.folder, name=name, address=address))
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", f"{bridge}-{name}", "type", "veth", "peer", "name", "eth0", "netns", name)
        _run("ip", "link", "set", f"{bridge}-{name}", "master", bridge, "up")
        _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
        for interface in ("lo", "eth0"):
            _run("ip", "-n", name, "link", "set", interface, "up")
        sshd = f"hostname {name}; exec {shutil.which('sshd')} -f {config} -E {self.folder}/sshd.{name}.log"
        _run("ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", sshd)

    def _answers(self, name: str) -> bool:
        return subprocess.run(["ssh", name, "true"], env=self.environment, stdin=subprocess.DEVNULL, capture_output=True).returncode == 0


@contextmanager
def running_ssh_hosts(hosts: int, prefix: str) -> Iterator[SshHosts]:
    """Hosts with their own folder, gone at the end."""
    with public_folder("rlbatch-ssh-") as folder:
        machines = SshHosts(folder, hosts, prefix)
        try:
            machines.start()
            yield machines
        finally:
            machines.stop()


def _is_sshd(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().startswith("sshd")
    return False


def _add_bridge() -> int:
    """Makes a bridge with this machine's address for a set of hosts, and returns its number."""
    for number in range(NETWORKS):
        name = f"rlb{number}"
        try:
            _run("ip", "link", "add", name, "type", "bridge")
        except RuntimeError as error:
            if "exists" not in str(error):
                raise
            continue
        _run("ip", "address", "add", f"10.77.{number}.1/24", "dev", name)
        _run("ip", "link", "set", name, "up")
        return number
    raise RuntimeError(f"{NETWORKS} sets of hosts are up already")


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
