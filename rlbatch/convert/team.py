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

from rlbatch.api import CheckpointError, LaunchError, RlbatchError
from rlbatch.convert.output import TEAM, Draft, Output, write_file
from rlbatch.convert.presence import Presence
from rlbatch.launch.ranks.rank_info import RankInfo

START_S = 600.0
"""Longest wait for the first process to begin."""
SILENCE_S = 600.0
"""After so long without a sign of life, a process counts as ended, whatever its lock says."""
LOOK_S = 2.0
"""Seconds between looks at the others."""
GONE_S, LEFTOVER_S = 2.0, 20.0
"""Seconds for which the first process must be gone before others give up: one that was seen alive, or is of an earlier, killed start."""
_POLL_S = 0.1


class _ElsewhereError(CheckpointError):
    """Another process failed, and the others are told by itself or by the first one."""


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
        self._presence = Presence(self._folder, info.rank)
        self._shares: list[list[Output]] = []
        self._next_look = 0.0

    @property
    def is_first(self) -> bool:
        """Whether this process leads."""
        return self._info.rank == 0

    @contextlib.contextmanager
    def present(self) -> Iterator[None]:
        """The others see whether this process lives. The first one, which holds the draft, clears what an earlier start left."""
        if self._info.world_size == 1:
            yield
            return
        if self.is_first:
            self._folder.mkdir(exist_ok=True)
            self._presence.clear()
        with self._presence:
            yield

    def begin(self, unfinished: Sequence[str]) -> None:
        """The first process: says what is to be done."""
        if self._info.world_size == 1:
            return
        write_file(self._folder / "start.json", json.dumps({"start": self._start, "unfinished": list(unfinished)}).encode())

    def wait_for_start(self) -> list[str]:
        """The others: what is to be done.

        Raises:
            CheckpointError: the first process failed, or ended without a word.
            LaunchError: it did not begin.
        """
        until, lives, lived = time.monotonic() + START_S, False, time.monotonic()
        while time.monotonic() < until:
            with contextlib.suppress(OSError, ValueError):
                said = json.loads((self._folder / "start.json").read_text(encoding="utf-8"))
                if said["start"] == self._start and self._draft.has_plan():
                    return [str(name) for name in said["unfinished"]]
            if self._draft.is_complete():  # nothing had been left to do
                return []
            if self._presence.is_there(0):
                lives, lived = True, time.monotonic()
            elif not lives and not self._presence.is_gone(0) and not (self._folder / "failed.0").exists():  # it has not come yet
                lived = time.monotonic()
            if time.monotonic() - lived > (GONE_S if lives else LEFTOVER_S):
                self._raise_failures()
                raise self._lost(0, "before it said what is to be done; its own output may say why")
            time.sleep(_POLL_S)
        raise LaunchError(
            f"out={self._draft.out}: process 0 did not begin within {START_S:g} s. Do all processes see {self._draft.folder.parent}?"
        )

    def share(self, outputs: Sequence[Output], unfinished: Sequence[str]) -> list[Output]:
        """This process's part of the unfinished files: the largest first, each to whoever has least."""
        wanted, loads = set(unfinished), [0] * self._info.world_size
        self._shares = [[] for _ in loads]
        for output in sorted((output for output in outputs if output.name in wanted), key=lambda output: (-output.nbytes, output.name)):
            rank = loads.index(min(loads))
            loads[rank] += output.nbytes
            self._shares[rank].append(output)
        return self._shares[self._info.rank]

    def look(self) -> None:
        """Looks whether another process failed or was killed; to be called often.

        Raises:
            CheckpointError: one was.
        """
        if self._info.world_size > 1 and time.monotonic() > self._next_look:
            self._next_look = time.monotonic() + LOOK_S
            self._raise_failures()
            for rank in range(self._info.world_size) if self.is_first else [0]:
                if rank != self._info.rank and self._presence.is_gone(rank):
                    raise self._lost(rank, f"without a word on {self._presence.host(rank)} (killed, or out of memory?)")

    @contextlib.contextmanager
    def reporting_failures(self) -> Iterator[None]:
        """Lets the other processes know why this one ends."""
        try:
            yield
        except _ElsewhereError:
            raise
        except RlbatchError as error:
            if self._info.world_size > 1 and self._folder.is_dir():
                self._tell(self._info.rank, str(error))
            raise

    def _tell(self, rank: int, text: str) -> None:
        with contextlib.suppress(OSError):  # there with all its text or not at all: others may be looking
            said = self._folder / f"failing.{self._info.rank}"
            said.write_text(text, encoding="utf-8")
            said.rename(self._folder / f"failed.{rank}")

    def _lost(self, rank: int, how: str) -> CheckpointError:
        """The error for a process that cannot speak for itself any more; the first one tells the others."""
        text = f"out={self._draft.out}: it ended {how}. Start again: what is finished is kept."
        if self.is_first:
            self._tell(rank, text)
        return _ElsewhereError(f"process {rank}: {text}")

    def wait_for_all(self, outputs: Sequence[Output], *, verified: bool) -> None:
        """The first process: waits until every file is there.

        Raises:
            CheckpointError: another process failed, was killed, or gives no sign of life.
        """
        names = {output.name for output in outputs}
        while missing := names - set(self._draft.finished(verified=verified)):
            self.look()
            for rank, share in enumerate(self._shares):
                if rank and any(output.name in missing for output in share) and self._presence.silent_s(rank) > SILENCE_S:
                    raise CheckpointError(
                        f"out={self._draft.out}: {len(missing)} files are missing, first {min(missing)}, and process {rank}"
                        f" has given no sign of life for {SILENCE_S:g} s. Start again: what is finished is kept."
                    )
            time.sleep(_POLL_S)

    def _raise_failures(self) -> None:
        for path in sorted(self._folder.glob("failed.*")):
            if path.suffix != f".{self._info.rank}":
                raise _ElsewhereError(f"process {path.suffix[1:]}: {path.read_text(encoding='utf-8')}")
