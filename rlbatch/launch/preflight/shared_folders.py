"""Checks whether every node sees and may write the run's folders: a file written on one node is read on others."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

PATIENCE_S = 10.0
"""Seconds for which a mark is looked for: a network file system may show a new file late."""
POLL_S = 0.2


class SharedFolders:
    """One node's view of folders that all nodes share, which are made if they are missing; ``rank`` is the node's first."""

    def __init__(self, folders: Sequence[Path], token: str, rank: int) -> None:
        self._folders, self._token, self._rank = folders, token, rank

    def write(self) -> list[str]:
        """Leaves this node's mark; returns a sentence for each folder that cannot be written."""
        problems = []
        for folder in self._folders:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self._mark(folder, self._rank).write_text(str(self._rank), encoding="ascii")
            except OSError as error:
                problems.append(f"cannot write {folder} ({error.strerror})")
        return problems

    def read(self, writers: Sequence[int]) -> list[tuple[Path, int]]:
        """Folders in which the mark of a writer, a node's first rank, is not to be seen, with the writer; called once all have written."""
        deadline = time.monotonic() + PATIENCE_S
        wanted = [(folder, writer) for folder in self._folders for writer in writers]
        while (missing := [pair for pair in wanted if not self._sees(*pair)]) and time.monotonic() < deadline:
            time.sleep(POLL_S)
            wanted = missing
        return missing

    def remove(self) -> None:
        """Takes this node's marks away; to be called once all have read."""
        for folder in self._folders:
            try:
                self._mark(folder, self._rank).unlink(missing_ok=True)
            except OSError:  # it could not be written either, which was told
                continue

    def _mark(self, folder: Path, rank: int) -> Path:
        return folder / f".preflight-{self._token}-{rank}"

    def _sees(self, folder: Path, writer: int) -> bool:
        try:
            return self._mark(folder, writer).read_text(encoding="ascii") == str(writer)
        except OSError:
            return False


def unreadable(paths: Sequence[Path]) -> list[str]:
    """One sentence for each path that this process cannot read."""
    return [f"cannot read {path} ({'no permission' if path.exists() else 'not there'})" for path in paths if not os.access(path, os.R_OK)]
