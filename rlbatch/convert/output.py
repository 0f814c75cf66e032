"""Output files as streams of bytes, and the folder that they become: invisible until it is complete, kept when a conversion is killed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlbatch.api import CheckpointError, ConfigError, DataError, LaunchError, RlbatchError
from rlbatch.checkpoint.block_file import BLOCK_BYTES, BlockFile, Part
from rlbatch.checkpoint.origin import MARKER
from rlbatch.checkpoint.run_folder import sync

PLAN = ".plan.json"
START_S = 600.0
"""Longest wait for the first process to begin."""
POLL_S = 0.1
SPARE_BYTES = 2**20
"""Room for metadata, folders and what else is small."""
_DONE, _CLAIMS = ".done", ".claims"

Advance = Callable[[int], None]


@dataclass(frozen=True)
class Output:
    """A file to be made.

    Attributes:
        name: The file's name in the output folder.
        nbytes: Its exact length.
        parts: Makes its bytes, in order and anew at each call; a part's memory may be that of the next one.
    """

    name: str
    nbytes: int
    parts: Callable[[], Iterator[Part]]


class Draft:
    """``<out>.part``, in which an output grows file by file until it gets its name.

    Args:
        out: What it shall be called.
        plan: All that determines the output's bytes; a draft that was begun with another plan is refused.
    """

    def __init__(self, out: Path, plan: Mapping[str, Any]) -> None:
        self.out, self.folder = out, out.with_name(f"{out.name}.part")
        self._plan = json.loads(json.dumps(plan))

    def is_complete(self) -> bool:
        """Whether the output is there, with files of the sizes that they had, and was made by this very conversion."""
        try:
            made = json.loads((self.out / MARKER).read_text(encoding="utf-8"))
            is_ours = isinstance(made, dict) and made.get("plan") == self._plan
            return is_ours and all((self.out / name).stat().st_size == about["bytes"] for name, about in made["files"].items())
        except (OSError, ValueError):
            return False

    def check_out(self) -> None:
        """Refuses to overwrite anything.

        Raises:
            ConfigError: the output exists.
        """
        if self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            raise ConfigError(f"out={self.out}: exists and is not empty. Remove it, or choose another.")

    @contextlib.contextmanager
    def opened(self, outputs: Sequence[Output] = (), rank: int = 0, world_size: int = 1) -> Iterator[None]:
        """The first process of a conversion makes the draft, or takes one up that was left behind, and holds it; others wait for that.

        Args:
            outputs: What there must be room for.
            rank: This process's in its conversion.
            world_size: Processes of the conversion.

        Raises:
            ConfigError: the output exists, somebody else is converting to it, the draft is of another conversion, or there is no room.
            LaunchError: the first process did not begin.
        """
        if rank:
            self._wait_for_first()
            yield
            return
        self.check_out()
        try:
            for hidden in (_DONE, _CLAIMS):
                (self.folder / hidden).mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise ConfigError(f"out={self.out}: {error.filename} cannot be made ({error.strerror}). Choose another folder.") from error
        try:
            self._lock(descriptor)
            self._check_plan()
            try:
                self._remove_leftovers()
                self.check_room(outputs)
                write_file(self.folder / PLAN, json.dumps(self._plan).encode())
                yield
            except RlbatchError:
                if not self.finished() and (world_size == 1 or not self.has_plan()):  # nothing for other starts or processes
                    shutil.rmtree(self.folder, ignore_errors=True)
                raise
        finally:
            os.close(descriptor)

    def _wait_for_first(self) -> None:
        until = time.monotonic() + START_S
        while not (self.has_plan() or self.is_complete()):
            self._check_plan()
            if time.monotonic() > until:
                raise LaunchError(
                    f"out={self.out}: process 0 did not begin within {START_S:g} s. Do all processes see {self.folder.parent}?"
                )
            time.sleep(POLL_S)

    def has_plan(self) -> bool:
        """Whether the draft is there and of this conversion."""
        return bool(self._found_plan() == self._plan)

    def _found_plan(self) -> Any:
        try:
            return json.loads((self.folder / PLAN).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def _lock(self, descriptor: int) -> None:
        if _try_lock(descriptor) is False:
            raise ConfigError(f"out={self.out}: another conversion is writing it. Wait for its end, or choose another.")
        if not self.folder.exists() or os.fstat(descriptor).st_ino != self.folder.stat().st_ino:
            raise ConfigError(f"out={self.out}: another conversion has just ended there. Start again, or choose another.")

    def _check_plan(self) -> None:
        found = self._found_plan()
        if found is not None and self.finished() and (changed := _difference(found, self._plan)):
            raise ConfigError(f"{self.folder}: was left by another conversion ({changed}). Remove it, or give the same arguments.")

    def _remove_leftovers(self) -> None:
        """Removes drafts of a start on this machine that was killed; another machine's go when the output is complete."""
        for leftover in self.folder.glob(f"[!.]*.{socket.gethostname()}.*.part"):
            with self.claimed(leftover.name.partition(f".{socket.gethostname()}.")[0]) as is_free:
                if is_free:
                    leftover.unlink(missing_ok=True)

    @contextlib.contextmanager
    def claimed(self, name: str) -> Iterator[bool | None]:
        """Whether a file is this process's to make, and no other's; None: the file system has no locks."""
        try:
            descriptor = os.open(self.folder / _CLAIMS / name, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:  # the output has been completed
            yield False
            return
        try:
            yield _try_lock(descriptor)
        finally:
            os.close(descriptor)

    def growth(self) -> tuple[int, int]:
        """Changes while any process makes something: finished files, and bytes of those that are being written."""
        return len(list((self.folder / _DONE).glob("*.json"))), self._being_written()

    def _being_written(self) -> int:
        nbytes = 0
        for path in self.folder.glob("*.part"):
            with contextlib.suppress(OSError):
                nbytes += path.stat().st_size
        return nbytes

    def finished(self, *, verified: bool = False) -> dict[str, tuple[int, int]]:
        """Size and CRC-32 of the files that are whole.

        Args:
            verified: Only those that were read again and compared.
        """
        found: dict[str, tuple[int, int]] = {}
        for path in (self.folder / _DONE).glob("*.json"):
            with contextlib.suppress(OSError, ValueError, KeyError):
                about = json.loads(path.read_text(encoding="utf-8"))
                if (self.folder / about["name"]).stat().st_size == about["bytes"] and (about["verified"] or not verified):
                    found[about["name"]] = (about["bytes"], about["crc32"])
        return found

    def check_room(self, outputs: Iterable[Output]) -> None:
        """Refuses to begin what has no room.

        Raises:
            ConfigError: with both numbers.
        """
        free, done = shutil.disk_usage(self.folder).free, self.finished()
        need = sum(output.nbytes for output in outputs if output.name not in done) + SPARE_BYTES
        if free + self._being_written() < need:
            raise ConfigError(
                f"out={self.out}: needs {need / 1e9:.3f} GB, {free / 1e9:.3f} GB are free. Free space, or choose another disk."
            )

    def write(self, output: Output, advance: Advance) -> None:
        """Makes a file: it has its name only once it is whole and on the disk.

        Args:
            output: The file.
            advance: Told how many bytes were written.

        Raises:
            CheckpointError: it cannot be written.
            RlbatchError: what ``parts`` raises.
        """
        path = self.folder / output.name
        draft = path.with_name(_unfinished(path))
        try:
            with BlockFile(draft) as file:
                for part in output.parts():
                    before = file.nbytes
                    file.write(part)
                    advance(file.nbytes - before)
                file.finish()
            if file.nbytes != output.nbytes:
                raise RuntimeError(f"{output.name}: {file.nbytes} bytes were made, {output.nbytes} announced")
            if not self.has_plan() and not self.is_complete():
                raise CheckpointError(f"out={self.out}: another conversion has taken {self.folder}. Wait for its end, or choose another.")
            os.replace(draft, path)
            sync(self.folder)
            self._record(output.name, file.nbytes, file.crc32, verified=False)
        except OSError as error:
            if self.is_complete():  # others made the file too, where there are no locks
                return
            draft.unlink(missing_ok=True)
            free = shutil.disk_usage(self.out.parent).free
            why = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error.strerror)
            raise CheckpointError(
                f"out={self.out}: {output.name} ({output.nbytes / 1e9:.3f} GB) cannot be written: {why}, {free / 1e9:.3f} GB are free. "
                "What was finished is kept: free space and start again."
            ) from error

    def verify(self, output: Output, advance: Advance) -> None:
        """Reads a finished file and compares it with what the source gives now.

        Raises:
            DataError: they differ.
        """
        try:
            self._compare(output, advance)
        except (OSError, KeyError):
            if not self.is_complete():  # by the others, where there are no locks
                raise

    def _compare(self, output: Output, advance: Advance) -> None:
        path = self.folder / output.name
        nbytes, checksum = self.finished()[output.name]
        with path.open("rb", buffering=0) as file:
            for part in output.parts():
                made = memoryview(part)
                for piece in (made[start : start + BLOCK_BYTES] for start in range(0, len(made), BLOCK_BYTES)):
                    position, found = file.tell(), file.read(len(piece))
                    if not np.array_equal(np.frombuffer(found, np.uint8), np.frombuffer(piece, np.uint8)):
                        raise DataError(
                            f"{path}: differs from the converted source at byte {position} or after. The disk or the memory is damaged."
                        )
                    advance(len(piece))
            if file.read(1):
                raise DataError(f"{path}: has more bytes than the source gives. Remove {self.folder} and convert again.")
        self._record(output.name, nbytes, checksum, verified=True)

    def _record(self, name: str, nbytes: int, checksum: int, *, verified: bool) -> None:
        about = {"name": name, "bytes": nbytes, "crc32": checksum, "verified": verified}
        write_file(self.folder / _DONE / f"{name}.json", json.dumps(about).encode())

    def publish(self, about: Mapping[str, Any], small: Mapping[str, bytes]) -> None:
        """Adds small files and the marker, and gives the folder its name.

        Args:
            about: What the marker says of the conversion.
            small: Name -> content.
        """
        files = {name: {"bytes": size, "crc32": checksum} for name, (size, checksum) in sorted(self.finished().items())}
        try:
            for name, content in small.items():
                (self.folder / name).parent.mkdir(exist_ok=True)
                write_file(self.folder / name, content)
            write_file(self.folder / MARKER, json.dumps({**about, "plan": self._plan, "files": files}, indent=1).encode())
        except OSError as error:
            raise CheckpointError(f"out={self.out}: cannot be completed ({error.strerror}). Free space and start again.") from error
        for leftover in self.folder.glob("*.part"):
            leftover.unlink()
        os.replace(self.folder, self.out)
        sync(self.out.parent)
        self.tidy()

    def tidy(self) -> None:
        """Removes what a complete output does not need: last, or by the next start if this one is killed before."""
        for hidden in (_DONE, _CLAIMS):
            shutil.rmtree(self.out / hidden, ignore_errors=True)
        (self.out / PLAN).unlink(missing_ok=True)


def _try_lock(descriptor: int) -> bool | None:
    """Whether nobody else holds the file or folder; None: the file system has no locks, and is taken as it is."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _unfinished(path: Path) -> str:
    """A file's name until it is whole: of this process alone, as one of a killed start may still be at the same file."""
    return f"{path.name}.{socket.gethostname()}.{os.getpid()}.part"


def write_file(path: Path, content: bytes) -> None:
    """Writes a file that is there as a whole or not at all, also after a power cut."""
    draft = path.with_name(_unfinished(path))
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
    sync(path.parent)


def _difference(old: Any, new: Any, name: str = "") -> str:
    """The first value in which two plans differ, in words; empty if they are equal."""
    if isinstance(old, dict) and isinstance(new, dict):
        inner = (_difference(old.get(key), new.get(key), f"{name}{'.' if name else ''}{key}") for key in sorted({*old, *new}))
        return next((text for text in inner if text), "")
    return "" if old == new else f"{name} was {json.dumps(old)}, is {json.dumps(new)}"
