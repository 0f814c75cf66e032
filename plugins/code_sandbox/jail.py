"""The jail: a script of the standard library alone. It builds the jail around itself, runs one program in it, and tells how that ended.

Started as ``jail.py <fd of the job> <fd for the report>``. Three processes: the outer one has the namespaces made and waits; the inner one
is the first of the new process namespace, so that its end is the end of all; the program is its child.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import resource
import signal
import stat
import struct
import sys
import time

TYPE_CHECKING = False  # typing is slow to import
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
ANY_NAMESPACE = NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC, PRIVATE, DETACH = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18, 2
PDEATHSIG, DUMPABLE, SUBREAPER, SECCOMP, NO_NEW_PRIVS, CAPBSET_DROP = 1, 4, 36, 22, 38, 24
KEPT_MOUNT_FLAGS = {8: NOEXEC, 1024: 1024, 2048: 2048, 4096: 1 << 21}
"""Flags that a mount of another user namespace must keep: number for statvfs -> number for mount."""
NOBODY, FIRST_UID = 65534, 0x6A000000
"""User ids of jails: ``NOBODY`` without root; with root each has its own, from ``FIRST_UID`` on, as limits on processes count per user."""
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/etc/alternatives", "/etc/ld.so.cache")
PLACES = ("/mnt", "/media", "/srv", "/opt", "/var/tmp", "/tmp", "/home", "/root")
"""Folders in one of which the new root is made, out of sight of all others."""
DEVICES = ("null", "zero", "full", "random", "urandom")
LOOK_S = 0.01
DENIED = {
    # mount, umount2, pivot_root, unshare, setns, ptrace, process_vm_readv, process_vm_writev, bpf, perf_event_open, keyctl, add_key,
    # request_key, userfaultfd, memfd_create, shmget, msgget, semget
    "x86_64": (0xC000003E, 56, (165, 166, 155, 272, 308, 101, 310, 311, 321, 298, 250, 248, 249, 323, 319, 29, 68, 64)),
    "aarch64": (0xC00000B7, 220, (40, 39, 41, 97, 268, 117, 270, 271, 280, 241, 219, 217, 218, 282, 279, 194, 186, 190)),
}
"""Architecture -> its audit number, the number of clone, and the denied calls: they give memory that no limit counts, or ways to attack."""
RESTRICTED = {
    # socket, socketpair, setsockopt, prlimit64
    "x86_64": (41, 53, 54, 302),
    "aarch64": (198, 199, 208, 261),
}
"""Architecture -> numbers of the calls of which some uses are denied."""
AF_UNIX, AF_INET, AF_INET6, SO_SNDBUF = 1, 2, 10, 7
DENIED_EVERYWHERE = (425, 428, 429, 430, 432, 438, 442, 447)
"""Denied calls with the same number everywhere: io_uring_setup, open_tree, move_mount, fsopen, fsmount, pidfd_getfd, mount_setattr and
memfd_secret.
"""
CLONE3 = 435

libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int) -> int:
    """Returns a system call's result; raises OSError if it failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def prctl(option: int, *values: int) -> None:
    """Calls prctl; raises OSError if it fails."""
    checked(libc.prctl(option, *(ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4])))


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """Calls mount; raises OSError if it fails."""
    arguments = [None if value is None else value.encode() for value in (source, target, kind)]
    checked(libc.mount(*arguments, ctypes.c_ulong(flags), None if options is None else options.encode()))


def has_id(number: int) -> bool:
    """Whether there is a user and a group of this number: a container's root may have few, or only itself, and is a user as any other."""
    for name in ("uid_map", "gid_map"):
        with open(f"/proc/self/{name}", encoding="ascii") as file:
            ranges = [[int(word) for word in line.split()] for line in file]
        if not any(first <= number < first + count for first, _, count in ranges):
            return False
    return True


class Jail:
    """The isolation of one job's program; ``missing`` says what this machine does not keep the program from."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        """Takes a job as ``sandbox.start`` writes it; isolates nothing yet."""
        self.job = job
        self.missing: dict[str, str] = {}
        self.uid = os.geteuid()
        self.is_root = self.uid == 0
        self.folder = ""

    def enter(self) -> None:
        """Leaves the machine's namespaces."""
        if self.is_root and has_id(FIRST_UID + os.getpid()):
            self.uid = FIRST_UID + os.getpid()
            try:
                checked(libc.unshare(NEWNS))
            except OSError:  # a root that may not: as the user that the program will be
                self.become()
                self.is_root = False
        else:
            self.is_root = False
        if not self.is_root:
            outer, group = os.geteuid(), os.getegid()
            if self.unshare(NEWUSER, "user"):
                for name, text in (("setgroups", "deny"), ("uid_map", f"{NOBODY} {outer} 1"), ("gid_map", f"{NOBODY} {group} 1")):
                    with open(f"/proc/self/{name}", "w") as file:
                        file.write(text)
                self.uid = NOBODY
            self.unshare(NEWNS, "files")
        self.unshare(NEWPID, "processes")
        self.unshare(NEWNET, "network")
        for flag in (NEWIPC, NEWUTS, NEWCGROUP):
            libc.unshare(flag)
        if platform.machine() not in DENIED:
            self.missing["syscalls"] = f"no list for {platform.machine()}"

    def unshare(self, flag: int, what: str) -> bool:
        """Leaves a namespace, or notes in ``missing`` why it cannot; returns whether it could."""
        try:
            checked(libc.unshare(flag))
        except OSError as error:
            self.missing[what] = str(error.strerror)
        return what not in self.missing

    def become(self) -> None:
        """Becomes the user that the program is, for good."""
        if os.geteuid() != 0:
            return
        os.setgroups([])
        os.setresgid(self.uid, self.uid, self.uid)
        os.setresuid(self.uid, self.uid, self.uid)
        prctl(PDEATHSIG, signal.SIGKILL)  # forgotten by a process that becomes another user

    def build(self) -> None:
        """Makes the new root and goes into it; of a machine without mount namespaces only a folder."""
        if "files" in self.missing:
            self.folder = root = f"/tmp/rlbatch-code-{os.urandom(8).hex()}"
            os.mkdir(root, 0o700)
        else:
            root = self.new_root()
        for name in ("work", "tmp"):
            path = os.path.join(root, name)
            os.mkdir(path, 0o700)
            if self.is_root:
                os.chown(path, self.uid, self.uid)
        os.mkdir(os.path.join(root, "jail"), 0o755)
        for name, text in self.job["files"].items():
            self.write(os.path.join(root, "jail", name), text)
        if self.job["input"] is not None:
            self.write(os.path.join(root, "jail", "input"), self.job["input"])
        if "files" in self.missing:
            if self.is_root:
                os.chown(root, self.uid, self.uid)
            os.chdir(root)
            return
        os.mkdir(f"{root}/proc", 0o755)
        if "processes" not in self.missing:
            try:  # before the old root goes: only who sees a whole /proc may have another
                mount("proc", f"{root}/proc", "proc", NOSUID | NODEV | NOEXEC)
            except OSError as error:
                self.missing["memory"] = f"/proc: {error.strerror}"
        os.chdir(root)
        checked(libc.pivot_root(b".", b"."))
        checked(libc.umount2(b".", DETACH))
        os.chdir("/")

    def write(self, path: str, text: str) -> None:
        """Makes a file that programs can only read."""
        with open(path, "w", encoding="utf-8", errors="backslashreplace", newline="") as file:
            file.write(text)
        os.chmod(path, 0o444)

    def new_root(self) -> str:
        """An empty file system in memory, with what programs need of this one, which they cannot write."""
        shown = [*SYSTEM, *self.job["show"]]
        root = next(place for place in PLACES if os.path.isdir(place) and not any(f"{path}/".startswith(f"{place}/") for path in shown))
        mount("none", "/", None, REC | PRIVATE)
        mount("tmpfs", root, "tmpfs", NOSUID | NODEV, f"size={self.job['disk']},nr_inodes=20000,mode=755")
        for path in shown:
            self.show(root, path)
        os.mkdir(f"{root}/dev", 0o755)
        for name in DEVICES:
            os.close(os.open(f"{root}/dev/{name}", os.O_CREAT | os.O_WRONLY, 0o666))
            mount(f"/dev/{name}", f"{root}/dev/{name}", None, BIND)
        os.symlink("/proc/self/fd", f"{root}/dev/fd")
        os.symlink("/tmp", f"{root}/dev/shm")
        os.mkdir(f"{root}/etc", 0o755) if not os.path.isdir(f"{root}/etc") else None
        self.write(f"{root}/etc/passwd", f"nobody:x:{self.uid}:{self.uid}:nobody:/work:/bin/sh\n")
        return root

    def show(self, root: str, path: str) -> None:
        """Makes a folder or file of the machine visible, not writable."""
        target = root + path
        if os.path.lexists(target) or not os.path.lexists(path):
            return
        os.makedirs(os.path.dirname(target), 0o755, exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), target)
            return
        if stat.S_ISDIR(os.stat(path).st_mode):
            os.mkdir(target, 0o755)
        else:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
        mount(path, target, None, BIND | REC)
        now = os.statvfs(path).f_flag
        kept = sum(flag for said, flag in KEPT_MOUNT_FLAGS.items() if now & said)
        mount("none", target, None, REMOUNT | BIND | RDONLY | NOSUID | NODEV | kept)

    def program(self) -> None:
        """Becomes the program."""
        job = self.job
        os.setsid()
        jail = os.path.join(self.folder or "/", "jail")
        if job["input"] is not None:
            os.dup2(os.open(f"{jail}/input", os.O_RDONLY), 0)
        os.chdir(os.path.join(self.folder or "/", "work"))
        command = [part.replace("{jail}", jail) for part in job["command"]]
        environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": os.getcwd(), "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
        environment["TMPDIR"] = os.path.join(self.folder or "/", "tmp")
        for number in range(1, signal.NSIG):
            if number not in (signal.SIGKILL, signal.SIGSTOP, 32, 33):
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        megabyte = 2**20
        limits = {
            resource.RLIMIT_CPU: int(job["seconds"]) + 1,
            resource.RLIMIT_FSIZE: job["disk"],
            resource.RLIMIT_NOFILE: 128,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_MEMLOCK: 0,
            resource.RLIMIT_MSGQUEUE: 0,
            resource.RLIMIT_SIGPENDING: 256,
            resource.RLIMIT_STACK: 64 * megabyte,
            resource.RLIMIT_NPROC: job["processes"],
        }
        if job["limit_addresses"]:
            limits[resource.RLIMIT_AS] = job["memory"]
        limits[resource.RLIMIT_DATA] = resource.getrlimit(resource.RLIMIT_DATA)[1]  # a worker's own bound is none of its programs
        for kind, most in limits.items():
            allowed = resource.getrlimit(kind)[1]
            most = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
            resource.setrlimit(kind, (most, most))
        self.become()
        os.umask(0o077)
        prctl(NO_NEW_PRIVS, 1)
        drop_capabilities()
        if "syscalls" not in self.missing:
            deny_calls()
        os.execve(command[0], command, environment)


def drop_capabilities() -> None:
    """Drops all capabilities of this process, also those of the bounding set where it may."""
    for number in range(64):
        libc.prctl(CAPBSET_DROP, ctypes.c_ulong(number), 0, 0, 0)
    header, none = struct.pack("Ii", 0x20080522, 0), struct.pack("6I", *[0] * 6)
    checked(libc.capset(ctypes.c_char_p(header), ctypes.c_char_p(none)))


def deny_calls() -> None:
    """Denies the system calls of ``DENIED`` and new namespaces, to this process and all its descendants."""
    machine, clone, denied = DENIED[platform.machine()]
    load, jump_equal, jump_set, jump_least, answer = 0x20, 0x15, 0x45, 0x35, 0x06
    allow, no, unknown, kill = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS, 0x80000000
    lines = [(load, 0, 0, 4), (jump_equal, 1, 0, machine), (answer, 0, 0, kill), (load, 0, 0, 0)]
    lines += [(jump_least, 0, 1, 0x40000000), (answer, 0, 0, unknown)]  # another set of calls of the same machine
    for number in (*denied, *DENIED_EVERYWHERE):
        lines += [(jump_equal, 0, 1, number), (answer, 0, 0, no)]
    lines += [(jump_equal, 0, 1, CLONE3), (answer, 0, 0, unknown)]  # its flags cannot be read here: clone is used instead
    lines += [(jump_equal, 0, 3, clone), (load, 0, 0, 16), (jump_set, 0, 1, ANY_NAMESPACE), (answer, 0, 0, no)]
    socket, socketpair, setsockopt, prlimit = RESTRICTED[platform.machine()]

    def decide(number: int, argument: int, values: tuple[int, ...], these: int, others: int) -> None:
        """Answers a call by one of its arguments, from 0."""
        tests = [(jump_equal, len(values) - place, 0, value) for place, value in enumerate(values)]
        lines.extend([(jump_equal, 0, len(values) + 3, number), (load, 0, 0, 16 + 8 * argument), *tests])
        lines.extend([(answer, 0, 0, others), (answer, 0, 0, these)])

    for number in (socket, socketpair):  # others, such as vsock, lead out of a network namespace
        decide(number, 0, (AF_UNIX, AF_INET, AF_INET6), allow, no)
    decide(setsockopt, 2, (SO_SNDBUF,), no, allow)  # what it holds is in no process's memory
    decide(prlimit, 0, (0,), allow, no)  # of itself, not of the jail's first process, which may be the same user
    lines += [(answer, 0, 0, allow)]
    code = b"".join(struct.pack("HBBI", *line) for line in lines)
    held = ctypes.create_string_buffer(code)
    program = struct.pack("HP", len(lines), ctypes.addressof(held))
    checked(libc.prctl(SECCOMP, 2, ctypes.c_char_p(program), 0, 0))


def watch(main: int, job: Mapping[str, Any], *, sees_all: bool, is_alone: bool) -> dict[str, Any]:
    """Waits for the program's end, or its limits; reaps what it leaves. It counts processes if it ``sees_all``, and sockets if it
    ``is_alone`` in its network namespace.
    """
    deadline = time.monotonic() + job["seconds"]
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    while True:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return {"end": "lost"}
            if pid == main:
                return {"end": "exit", "code": os.waitstatus_to_exitcode(status)}
            if not pid:
                break
        if time.monotonic() > deadline:
            return {"end": "time"}
        if sees_all and resident() + (buffers() if is_alone else 0) > job["memory"]:
            return {"end": "memory"}
        signal.sigtimedwait([signal.SIGCHLD], LOOK_S)


def resident() -> int:
    """Bytes of memory that all processes here have, but this one."""
    pages = 0
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            try:
                with open(f"/proc/{name}/statm", "rb") as file:
                    pages += int(file.read().split()[1])
            except (OSError, IndexError):
                continue  # it is gone
    return pages * resource.getpagesize()


def buffers() -> int:
    """Bytes that the sockets of this network namespace may hold: they are in no process's memory."""
    try:
        with open("/proc/net/sockstat", encoding="ascii") as file:
            used = int(file.readline().split()[2])
        with open("/proc/sys/net/core/wmem_default", encoding="ascii") as file:
            return used * int(file.read())
    except (OSError, ValueError, IndexError):
        return 0


def kill_children() -> None:
    """Kills all that came of this process, which is nobody's first: those who lose their parent become its children.

    First they are stopped, until no new ones come: what is stopped forks no more.
    """
    while found := descendants():
        before: set[int] = set()
        while found != before:
            send(found, signal.SIGSTOP)
            before, found = found, descendants()
        send(found, signal.SIGKILL)
        try:
            while True:
                os.waitpid(-1, 0)
        except ChildProcessError:
            continue


def send(pids: set[int], number: int) -> None:
    """Sends a signal to those of the processes that still live."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except OSError:
            continue


def descendants() -> set[int]:
    """Children of this process, and theirs."""
    parents = {}
    for name in os.listdir("/proc"):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
    found: set[int] = set()
    new = {os.getpid()}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new} - found
        found |= new
    return found


def inside(jail: Jail, report: int, outer: int) -> None:
    """Runs the first process of the jail."""
    prctl(PDEATHSIG, signal.SIGKILL)
    has_namespace = "processes" not in jail.missing
    if not has_namespace:
        jail.missing["memory"] = "no process namespace"
        prctl(SUBREAPER, 1)
        if os.getppid() != outer:
            os._exit(1)
    answer: dict[str, Any] = {}
    try:
        jail.build()
        if unwanted := {what: why for what, why in jail.missing.items() if what not in jail.job["weaker"]}:
            answer = {"missing": unwanted}
        else:
            prctl(DUMPABLE, 0)
            main = os.fork()
            if not main:
                try:
                    jail.program()
                except BaseException as error:
                    os.write(report, json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode() + b"\n")
                os._exit(127)
            answer = watch(main, jail.job, sees_all="memory" not in jail.missing, is_alone="network" not in jail.missing)
    except BaseException as error:
        answer = {"failed": f"{type(error).__name__}: {error}"}
    if not has_namespace:
        kill_children()
    if jail.folder:
        import shutil

        shutil.rmtree(jail.folder, ignore_errors=True)
    os.write(report, json.dumps(answer).encode() + b"\n")
    os._exit(0)


def run() -> None:
    """Runs the outer process, which builds the jail."""
    parent = os.getppid()
    prctl(PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    given, report = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(report, False)  # the program's start closes it, not before
    with os.fdopen(given, encoding="utf-8") as file:
        job = json.load(file)
    jail = Jail(job)
    try:
        jail.enter()
    except OSError as error:
        os.write(report, json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode() + b"\n")
        os._exit(0)
    me = os.getpid()
    child = os.fork()
    if not child:
        inside(jail, report, me)
    os.waitpid(child, 0)
    os._exit(0)


if __name__ == "__main__":
    run()
