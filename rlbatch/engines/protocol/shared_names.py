"""Names for the shared memory and semaphores that an engine's processes make with Python's ``multiprocessing``, and for folders of their
sockets: whose they are shows, so that what a killed engine left can be removed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from multiprocessing import process, shared_memory, synchronize
from pathlib import Path
from typing import Any

FOLDER = Path("/dev/shm")
PREFIX = "rlbatch-"
OWNER = "RLBATCH_ENGINE_HOST"
"""Variable that an engine's processes inherit: process id of their host."""
CLOCK_SLACK_S = 2.0
ZOMBIE = "Z"
"""State of a process that has ended and that its parent has not asked for."""


def name_shared_memory() -> None:
    """Makes this process name its shared memory and semaphores after its engine's host from here on."""
    owner = os.environ.setdefault(OWNER, str(os.getpid()))
    names = vars(shared_memory)
    names["_SHM_NAME_PREFIX"] = f"/{PREFIX}{_namespace()}-{owner}-"
    vars(process.current_process())["_config"]["semprefix"] = f"/{PREFIX}{_namespace()}-{owner}-mp"
    names["_SHM_SAFE_NAME_LENGTH"] = len(names["_SHM_NAME_PREFIX"]) + 16
    if not hasattr(synchronize.SemLock.__init__, "__wrapped__"):
        setattr(synchronize.SemLock, "__init__", _keeps_its_name(synchronize.SemLock.__init__))  # noqa: B010  (mypy: a method)


def _keeps_its_name(init: Callable[..., None]) -> Callable[..., None]:
    """Lets a semaphore keep Python's name. joblib, which scikit-learn imports, gives those of the whole process names of its own."""

    @wraps(init)
    def named(lock: Any, *args: Any, **kwargs: Any) -> None:
        lock._make_name = lambda: f"{vars(process.current_process())['_config']['semprefix']}-{next(lock._rand)}"
        try:
            init(lock, *args, **kwargs)
        finally:
            del lock._make_name

    return named


def private_folder() -> Path:
    """A new folder for sockets, named after this process, which only its user may enter; short enough for the paths of sockets."""
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{_namespace()}-{os.getpid()}-"))


def remove_leftovers() -> None:
    """Removes what engines left in shared folders whose process is gone. Other users' and other containers' is left alone."""
    mine = f"{PREFIX}{_namespace()}-"
    for path in [*FOLDER.glob(f"{mine}*"), *FOLDER.glob(f"sem.{mine}*"), *Path(tempfile.gettempdir()).glob(f"{mine}*")]:
        owner = path.name.removeprefix("sem.").removeprefix(mine).partition("-")[0]
        with suppress(OSError):  # another rank was faster, or it is another user's
            if owner.isdecimal() and _is_left(path, int(owner)):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _is_left(path: Path, owner: int) -> bool:
    """Whether the process of that id is gone, or is a later one, that was given the same id after the file was last changed."""
    try:
        # The command, which may hold anything, ends with the last parenthesis; the third value is the state, the 22nd the start, in ticks
        # after boot.
        values = Path(f"/proc/{owner}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except FileNotFoundError:
        return True
    if values[0] == ZOMBIE:
        return True
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(values[19]) / os.sysconf("SC_CLK_TCK")
    return path.lstat().st_ctime < time.time() - age_s - CLOCK_SLACK_S


def _namespace() -> int:
    """The number of this process's pid namespace, outside of which its process ids mean nothing."""
    return os.stat("/proc/self/ns/pid").st_ino
