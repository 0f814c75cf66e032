"""What a program in a jail cannot do: outlast its limits, leave anything, see or change anything outside."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from rlbatch_plugins.code_sandbox import sandbox
from rlbatch_plugins.code_sandbox.sandbox import MIB, Limits, Outcome, SandboxError, missing
from tests.stopwatch import Stopwatch

LIMITS = Limits(seconds=60.0, memory=256 * MIB, disk=16 * MIB, output=MIB, processes=16)
"""Of programs that end by themselves, however busy the machine is."""
SHORT_S = 2.0
"""Of those that do not."""
GONE_S = 60.0
SYSTEM_PYTHON = next((path for path in ("/usr/bin/python3", "/usr/local/bin/python3") if os.path.exists(path)), sys.executable)
"""One that every user may start."""


def run(program: str, limits: Limits = LIMITS) -> Outcome:
    return sandbox.run([sandbox.interpreter()[0], "-I", "-B", "{jail}/program"], {"program": program}, "1\n", limits)


def processes() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def folders() -> set[str]:
    """Those of programs that run now, or that left theirs: also other tests' beside this one."""
    return {path.name for path in Path("/tmp").glob("rlbatch-code-*")}


def assert_that_none_stays(before: set[str]) -> None:
    """Of the folders that came since then."""
    new, deadline = folders() - before, time.monotonic() + GONE_S
    while new & folders():
        assert time.monotonic() < deadline, new & folders()
        time.sleep(0.05)


FORK_BOMB = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
THREADS = (
    "import threading, time\nwhile True:\n    try: threading.Thread(target=time.sleep, args=(99,)).start()\n    except RuntimeError: pass"
)
DISK = "number = 0\nwhile True:\n    number += 1\n    try: open(f'/tmp/{number}', 'wb').write(bytes(10 ** 6))\n    except OSError: pass"
MANY = "import os\nfor _ in range(9):\n    if not os.fork():\n        held = bytearray(10 ** 8)\n        while True: pass\nwhile True: pass"
BUFFERS = """
import os, socket
for _ in range(13):
    if not os.fork(): break
held = []
while True:
    try: held.extend(socket.socketpair())
    except OSError: continue
    for end in held[-2:]:
        end.setblocking(False)
        try:
            while True: end.send(bytes(100000))
        except OSError: pass
"""
DAEMON = "import os, time\nif not os.fork():\n    os.setsid()\n    if not os.fork():\n        time.sleep(999)\n    os._exit(0)\nprint(42)"


@pytest.mark.parametrize(
    ("program", "ends"),
    [
        ("while True: pass", {"time"}),
        (FORK_BOMB, {"time"}),
        (THREADS, {"time"}),
        (DISK, {"time"}),
        (MANY, {"memory"}),
        (BUFFERS, {"memory"}),
        ("held = []\nwhile True: held.append(bytearray(10 ** 7))", {"exit", "memory"}),
        ("file = open('x', 'wb')\nwhile True: file.write(bytes(10 ** 6)) and file.flush()", {"exit"}),
        ("import os\nwhile True: os.write(1, bytes(10 ** 5))", {"output"}),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", {"time"}),
        ("import os, signal\nos.kill(-1, signal.SIGKILL)\nos.kill(os.getpid(), signal.SIGKILL)", {"exit"}),
        (
            "from signal import *\nfor number in range(1, 32):\n    try: signal(number, 1)\n    except OSError: pass\nwhile 1: pass",
            {"time", "exit"},
        ),
        (DAEMON, {"exit"}),
        ("import os\nos.symlink('/', 'all')\nos.symlink('x', 'x')\nprint(os.path.exists('all/root/.ssh'))", {"exit"}),
    ],
    ids=["loop", "forks", "threads", "files", "many", "buffers", "memory", "file", "output", "stop", "kill", "signals", "daemon", "links"],
)
def test_attacks_end_in_time_and_leave_nothing(program: str, ends: set[str]) -> None:
    """No process, no file; and a program after it runs as if nothing had been."""
    before, there, watch = processes(), folders(), Stopwatch()
    outcome = run(program, replace(LIMITS, seconds=SHORT_S) if "time" in ends else LIMITS)
    watch.assert_within(SHORT_S + sandbox.SETUP_S)
    assert outcome.end in ends
    assert processes() <= before
    assert_that_none_stays(there)
    assert run("print(int(input()) + 1)").output == b"2\n"


def test_a_program_sees_neither_the_run_nor_the_machine(tmp_path: Path) -> None:
    """Its environment, files, processes and network are its own; it is nobody, and may not become anybody."""
    os.environ["RLBATCH_TEST_SECRET"] = "hunter22"
    secret = tmp_path / "labels.jsonl"
    secret.write_text("hunter22")
    secret.chmod(0o666)
    server = socket.create_server(("127.0.0.1", 0))
    program = f"""
import json, os, socket
def tried(act):
    try: return repr(act())
    except Exception as error: return type(error).__name__
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print(json.dumps({{
    "environment": sorted(os.environ),
    "work": os.listdir("."),
    "file": tried(lambda: open({str(secret)!r}).read()),
    "processes": sum(name.isdigit() for name in os.listdir("/proc")),
    "root": os.getuid() == 0 or os.geteuid() == 0,
    "setuid": tried(lambda: os.setuid(0)),
    "parent": tried(lambda: open("/proc/1/mem", "rb").read(1)),
    "parent environment": tried(lambda: open("/proc/1/environ", "rb").read()),
    "system": tried(lambda: open("/usr/x", "w")),
    "jail": tried(lambda: open("/jail/program", "w")),
    "network": tried(lambda: socket.create_connection(("127.0.0.1", {server.getsockname()[1]}), 2)),
    "outside": tried(lambda: socket.create_connection(("1.1.1.1", 53), 2)),
    "unshare": libc.unshare(0x10000000),
    "ptrace": libc.ptrace(16, 1, 0, 0),
    "mount": libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None),
    "memfd": libc.memfd_create(b"x", 0),
    "of the first process": libc.prlimit(1, 7, bytes(16), None),
    "sockets that lead out": [tried(lambda: socket.socket(family, 1)) for family in (16, 38, 40)],
    "buffers": tried(lambda: socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)),
}}))
"""
    with server:
        seen = json.loads(run(program).output)
    del os.environ["RLBATCH_TEST_SECRET"]
    assert seen.pop("environment") == ["HOME", "LANG", "OMP_NUM_THREADS", "PATH", "TMPDIR"]
    assert seen.pop("processes") == 2 and seen.pop("work") == [] and not seen.pop("root")
    assert seen.pop("file") == "FileNotFoundError"
    assert seen.pop("parent environment") in ("PermissionError", "b''")
    assert {seen.pop(name) for name in ("unshare", "ptrace", "mount", "memfd", "of the first process")} == {-1}
    assert set(seen.pop("sockets that lead out")) == {"PermissionError"}  # netlink, the kernel's ciphers, the hypervisor
    refused = {"PermissionError", "OSError", "ConnectionRefusedError", "FileNotFoundError"}
    assert set(seen.values()) <= refused, seen


def test_programs_at_once_do_not_meet() -> None:
    """Each has its folder and its processes; limits count for each alone."""
    outcomes: list[Outcome] = []
    program = "import os, time\nopen('/tmp/mine', 'x').close()\ntime.sleep(0.5)\nprint(len(os.listdir('/tmp')))"
    threads = [threading.Thread(target=lambda: outcomes.append(run(program))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [outcome.output for outcome in outcomes] == 4 * [b"1\n"]


def test_what_came_in_time_counts_whenever_it_is_read() -> None:
    """The parent of a program that has ended was itself held up until after the deadline."""
    heard, told = os.pipe()
    jail = sandbox.start([sandbox.interpreter()[0], "-c", "print(42)"], {}, LIMITS, text="", stdout=told)
    os.close(told)
    jail.outputs.append(heard)
    jail.process.wait()
    jail.deadline = time.monotonic() - 1.0
    try:
        assert (jail.read(heard, MIB), jail.outcome()["end"]) == (b"42\n", "exit")
    finally:
        jail.close()


def test_a_program_inherits_nothing_and_one_that_cannot_start_is_told() -> None:
    """Of a job with more open files than select takes; what does not start is no wrong answer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        assert run("import os\nprint(len(os.listdir('/proc/self/fd')))").output == b"4\n"
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with pytest.raises(SandboxError, match=r"FileNotFoundError: .*'/usr/bin/no-such-thing'"):
        sandbox.run(["/usr/bin/no-such-thing"], {}, "", LIMITS)


KILLED = """
from rlbatch_plugins.code_sandbox.sandbox import Limits, interpreter, run
run([interpreter()[0], "-c", "while True: pass"], {}, "", Limits(seconds=600))
"""


def test_a_worker_that_is_killed_takes_its_programs_along() -> None:
    """As one that misses its deadline is: with SIGKILL."""
    worker = psutil.Popen([sys.executable, "-c", KILLED])
    deadline = time.monotonic() + GONE_S
    jails: list[psutil.Process] = []
    while not any(map(is_program, jails)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
        jails = worker.children(recursive=True)
    worker.kill()
    worker.wait()
    assert psutil.wait_procs(jails, GONE_S)[1] == []


def is_program(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.cmdline()[-1:] == ["while True: pass"]
    return False


UNPRIVILEGED = """
import sys
sys.path.insert(0, {folder!r})
import sandbox
limits = sandbox.Limits(seconds=60)
program = "import ctypes, os; print(os.getpid() < 9, ctypes.CDLL(None).prlimit(1, 7, bytes(16), None))"
print(sandbox.missing(limits), sandbox.run([sandbox.interpreter()[0], "-c", program], {{}}, "", limits).output)
"""


@pytest.mark.parametrize("is_root_of_a_container", [False, True])
def test_a_job_that_is_not_root_has_the_same_walls(tmp_path: Path, is_root_of_a_container: bool) -> None:
    """By user namespaces: nothing is missing. So has the root of a container that has no other users."""
    source = Path(sandbox.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        for name in ("sandbox.py", "jail.py"):
            copy = Path(folder) / name
            copy.write_text((source / name).read_text())
            copy.chmod(0o644)
        become = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if os.getuid() == 0 else []
        become += ["unshare", "--user", "--map-root-user"] if is_root_of_a_container else []
        done = subprocess.run(
            [*become, SYSTEM_PYTHON, "-B", "-c", UNPRIVILEGED.format(folder=folder)], capture_output=True, text=True, check=False
        )
    assert (done.stdout, done.stderr) == ("{} b'True -1\\n'\n", "")


def test_what_is_missing_is_named_and_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without namespaces runs nothing, unless told; then programs still have limits, and nothing stays."""
    jail = tmp_path / "jail.py"
    source = (Path(sandbox.__file__).parent / "jail.py").read_text()
    jail.write_text(source.replace("checked(libc.unshare(", "checked(-1 * (", 9))
    monkeypatch.setattr(sandbox, "__file__", str(tmp_path / "sandbox.py"))
    monkeypatch.setattr(sandbox, "interpreter", lambda: (SYSTEM_PYTHON, "/usr"))  # which every user may start
    found = missing(LIMITS)
    assert set(found) == {"user", "files", "processes", "network", "memory"}
    with pytest.raises(SandboxError, match="this machine does not isolate programs"):
        run("print(1)")
    weaker = replace(LIMITS, weaker=tuple(found))
    assert missing(weaker) == {}
    before, there = processes(), folders()
    assert run("print(42)", weaker).output == b"42\n"
    assert run(DAEMON, weaker).end == "exit"
    assert run(FORK_BOMB, replace(weaker, seconds=SHORT_S)).end == "time"
    assert processes() <= before
    assert_that_none_stays(there)
