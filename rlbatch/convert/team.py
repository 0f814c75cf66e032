"""The processes of one conversion. They meet through the draft folder, which all of them see; nothing listens and nothing connects.

Outputs do not depend on who makes them, and each appears whole: so processes need to agree on little. The first one holds the draft and
says what is to be done; the others take their share of that and end. It completes the output when all files are there.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlbatch.api import CheckpointError, LaunchError, RlbatchError
from rlbatch.convert.output import TEAM, Draft, Output, write_file
from rlbatch.launch.environment import RankInfo

START_S = 600.0
"""Longest wait for the first process to begin."""
SILENCE_S = 600.0
"""After so long without a sign of life, a process counts as ended."""
BEAT_S = 10.0
"""Seconds between signs of life."""
_POLL_S = 0.1


class _ElsewhereError(CheckpointError):
    """Another process failed, and said so itself."""


class Team:
    """This process among those of its conversion.

    Args:
        info: Of this process.
        draft: Where the conversion happens.
    """

    def __init__(self, info: RankInfo, draft: Draft) -> None:
        self._info, self._draft = info, draft
        self._folder = draft.folder / TEAM
        # Tells starts apart, as far as the launcher lets: an earlier start of the same conversion would do no harm.
        self._start = [info.world_size, info.job_id, info.restart_count, os.environ.get("SLURM_STEP_ID", ""), info.master_port]
        self._next_beat = 0.0

    @property
    def is_first(self) -> bool:
        """Whether this process leads."""
        return self._info.rank == 0

    def begin(self, unfinished: Sequence[str]) -> None:
        """The first process: says what is to be done. It holds the draft."""
        self._folder.mkdir(exist_ok=True)
        for old in self._folder.iterdir():
            old.unlink()
        write_file(self._folder / "start.json", json.dumps({"start": self._start, "unfinished": list(unfinished)}).encode())

    def wait_for_start(self) -> list[str]:
        """The others: what is to be done.

        Raises:
            LaunchError: the first process did not begin.
        """
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            with contextlib.suppress(OSError, ValueError):
                said = json.loads((self._folder / "start.json").read_text(encoding="utf-8"))
                if said["start"] == self._start and self._draft.has_plan():
                    return [str(name) for name in said["unfinished"]]
            if self._draft.is_complete():  # nothing had been left to do
                return []
            time.sleep(_POLL_S)
        raise LaunchError(
            f"out={self._draft.out}: process 0 did not begin within {START_S:g} s. Do all processes see {self._draft.folder.parent}?"
        )

    def share(self, outputs: Sequence[Output], unfinished: Sequence[str]) -> list[Output]:
        """This process's part of the unfinished files: the largest first, each to whoever has least."""
        wanted, loads, mine = set(unfinished), [0] * self._info.world_size, []
        for output in sorted((output for output in outputs if output.name in wanted), key=lambda output: (-output.nbytes, output.name)):
            rank = loads.index(min(loads))
            loads[rank] += output.nbytes
            if rank == self._info.rank:
                mine.append(output)
        return mine

    def beat(self) -> None:
        """Says that this process is alive, and looks whether another one failed; to be called often.

        Raises:
            CheckpointError: another process failed.
        """
        if self._info.world_size > 1 and time.monotonic() > self._next_beat:
            self._next_beat = time.monotonic() + BEAT_S
            (self._folder / f"alive.{self._info.rank}").touch()
            self._raise_failures()

    @contextlib.contextmanager
    def reporting_failures(self) -> Iterator[None]:
        """Lets the other processes know why this one ends."""
        try:
            yield
        except _ElsewhereError:
            raise
        except RlbatchError as error:
            if self._info.world_size > 1 and self._folder.is_dir():
                with contextlib.suppress(OSError):  # there with all its text or not at all: others may be looking
                    said = self._folder / f"failing.{self._info.rank}"
                    said.write_text(str(error), encoding="utf-8")
                    said.rename(self._folder / f"failed.{self._info.rank}")
            raise

    def wait_for_all(self, outputs: Sequence[Output], *, verified: bool) -> None:
        """The first process: waits until every file is there.

        Raises:
            CheckpointError: another process failed, or gives no sign of life.
        """
        names = {output.name for output in outputs}
        started = time.time()
        while missing := names - set(self._draft.finished(verified=verified)):
            self._raise_failures()
            silent = [rank for rank in range(1, self._info.world_size) if time.time() - self._last_beat(rank, started) > SILENCE_S]
            if len(silent) == self._info.world_size - 1:
                raise CheckpointError(
                    f"out={self._draft.out}: {len(missing)} files are missing, first {min(missing)}, and no other process has given a sign "
                    f"of life for {SILENCE_S:g} s. Start again: what is finished is kept."
                )
            time.sleep(_POLL_S)

    def _last_beat(self, rank: int, started: float) -> float:
        path: Path = self._folder / f"alive.{rank}"
        return max(started, path.stat().st_mtime) if path.exists() else started

    def _raise_failures(self) -> None:
        for path in sorted(self._folder.glob("failed.*")):
            if path.suffix != f".{self._info.rank}":
                raise _ElsewhereError(f"process {path.suffix[1:]}: {path.read_text(encoding='utf-8')}")
