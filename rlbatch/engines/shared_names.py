"""Names for the shared memory that an engine's processes make with Python's ``multiprocessing``, and for folders of their sockets: whose
they are shows, so that what a killed engine left can be removed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from multiprocessing import shared_memory
from pathlib import Path

FOLDER = Path("/dev/shm")
PREFIX = "rlbatch-"
OWNER = "RLBATCH_ENGINE_HOST"
"""Variable that an engine's processes inherit: process id of their host."""


def name_shared_memory() -> None:
    """From here on this process names its shared memory after its engine's host."""
    owner = os.environ.setdefault(OWNER, str(os.getpid()))
    names = vars(shared_memory)
    names["_SHM_NAME_PREFIX"] = f"/{PREFIX}{_namespace()}-{owner}-"
    names["_SHM_SAFE_NAME_LENGTH"] = len(names["_SHM_NAME_PREFIX"]) + 16


def private_folder() -> Path:
    """A new folder for sockets, named after this process, which only its user may enter; short enough for the paths of sockets."""
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{_namespace()}-{os.getpid()}-"))


def remove_leftovers() -> None:
    """Removes the shared memory and folders of engines whose process is gone. Other users' and other containers' are left alone."""
    mine = f"{PREFIX}{_namespace()}-"
    for path in [*FOLDER.glob(f"{mine}*"), *Path(tempfile.gettempdir()).glob(f"{mine}*")]:
        owner = path.name.removeprefix(mine).partition("-")[0]
        if owner.isdecimal() and not Path(f"/proc/{owner}").exists():
            with suppress(OSError):  # another rank was faster, or it is another user's
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _namespace() -> int:
    """Process ids mean something within it alone."""
    return os.stat("/proc/self/ns/pid").st_ino
