"""What a program in a jail cannot do: outlast its limits, leave anything, see or change anything outside."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

from rlbatch_plugins.code_sandbox import sandbox
from rlbatch_plugins.code_sandbox.sandbox import MIB, Limits, Outcome, SandboxError, missing

LIMITS = Limits(seconds=2.0, memory=256 * MIB, disk=16 * MIB, output=MIB, processes=16)
ALL_BUT_SETUP_S = LIMITS.seconds + sandbox.SETUP_S

SYSTEM_PYTHON = next((path for path in ("/usr/bin/python3", "/usr/local/bin/python3") if os.path.exists(path)), sys.executable)
"""One that every user may start."""


def run(program: str, limits: Limits = LIMITS) -> Outcome:
    return sandbox.run([sandbox.interpreter()[0], "-I", "-B", "{jail}/program"], {"program": program}, "1\n", limits)


def processes() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def of_jails() -> list[int]:
    """Processes of users that only jails have."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.uids().real >= 0x6A000000:
                found.append(process.pid)
        except psutil.NoSuchProcess:
            continue
    return found


FORK_BOMB = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
THREADS = (
    "import threading, time\nwhile True:\n    try: threading.Thread(target=time.sleep, args=(99,)).start()\n    except RuntimeError: pass"
)
DISK = "number = 0\nwhile True:\n    number += 1\n    try: open(f'/tmp/{number}', 'wb').write(bytes(10 ** 6))\n    except OSError: pass"
MANY = "import os\nfor _ in range(9):\n    if not os.fork():\n        held = bytearray(10 ** 8)\n        while True: pass\nwhile True: pass"
DAEMON = "import os, time\nif not os.fork():\n    os.setsid()\n    if not os.fork():\n        time.sleep(999)\n    os._exit(0)\nprint(42)"


@pytest.mark.parametrize(
    ("program", "ends"),
    [
        ("while True: pass", {"time"}),
        (FORK_BOMB, {"time"}),
        (THREADS, {"time"}),
        (DISK, {"time"}),
        (MANY, {"memory"}),
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
    ids=["loop", "forks", "threads", "files", "many", "memory", "file", "output", "stop", "kill", "signals", "daemon", "links"],
)
def test_attacks_end_in_time_and_leave_nothing(program: str, ends: set[str]) -> None:
    """No process, no file; and a program after it runs as if nothing had been."""
    before, files = processes(), set(os.listdir(tempfile.gettempdir()))
    started = time.monotonic()
    outcome = run(program)
    assert time.monotonic() - started < ALL_BUT_SETUP_S
    assert outcome.end in ends
    assert processes() <= before
    assert not [name for name in set(os.listdir(tempfile.gettempdir())) - files if name.startswith("rlbatch-code-")]
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
}}))
"""
    with server:
        seen = json.loads(run(program).output)
    del os.environ["RLBATCH_TEST_SECRET"]
    assert seen.pop("environment") == ["HOME", "LANG", "OMP_NUM_THREADS", "PATH", "TMPDIR"]
    assert seen.pop("processes") == 2 and seen.pop("work") == [] and not seen.pop("root")
    assert seen.pop("file") == "FileNotFoundError"
    assert seen.pop("parent environment") in ("PermissionError", "b''")
    assert {seen.pop(name) for name in ("unshare", "ptrace", "mount", "memfd")} == {-1}
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


KILLED = """
import os, sys, threading, time
from rlbatch_plugins.code_sandbox.sandbox import Limits, interpreter, run
threading.Thread(target=run, args=([interpreter()[0], "-c", "while True: pass"], {}, "", Limits(seconds=99)), daemon=True).start()
while not os.path.exists("/proc/self/task"): pass
time.sleep(1.5)
print("ready", flush=True)
time.sleep(99)
"""


def test_a_worker_that_is_killed_takes_its_programs_along() -> None:
    """As one that misses its deadline is: with SIGKILL."""
    worker = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE)
    assert worker.stdout is not None and worker.stdout.readline() == b"ready\n"
    jails = [child.pid for child in psutil.Process(worker.pid).children(recursive=True)]
    assert jails
    worker.kill()
    worker.wait()
    deadline = time.monotonic() + 20
    while any(psutil.pid_exists(pid) for pid in jails) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in jails if psutil.pid_exists(pid)]


UNPRIVILEGED = """
import sys
sys.path.insert(0, {folder!r})
import sandbox
limits = sandbox.Limits(seconds=3)
print(sandbox.missing(limits), sandbox.run([sandbox.interpreter()[0], "-c", "import os; print(os.getpid() < 9)"], {{}}, "", limits).output)
"""


def test_a_job_that_is_not_root_has_the_same_walls(tmp_path: Path) -> None:
    """By user namespaces: nothing is missing."""
    source = Path(sandbox.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        for name in ("sandbox.py", "jail.py"):
            copy = Path(folder) / name
            copy.write_text((source / name).read_text())
            copy.chmod(0o644)
        become = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if os.getuid() == 0 else []
        done = subprocess.run(
            [*become, SYSTEM_PYTHON, "-B", "-c", UNPRIVILEGED.format(folder=folder)], capture_output=True, text=True, check=False
        )
    assert (done.stdout, done.stderr) == ("{} b'True\\n'\n", "")


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
    weaker = Limits(seconds=2.0, processes=16, weaker=tuple(found))
    assert missing(weaker) == {}
    before, files = processes(), set(os.listdir(tempfile.gettempdir()))
    assert run("print(42)", weaker).output == b"42\n"
    assert run(DAEMON, weaker).end == "exit"
    assert run(FORK_BOMB, weaker).end == "time"
    assert processes() <= before
    assert not [name for name in set(os.listdir(tempfile.gettempdir())) - files if name.startswith("rlbatch-code-")]
