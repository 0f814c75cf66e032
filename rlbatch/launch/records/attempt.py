"""``attempt.json``: where rank 0 of the job's current attempt is to be found, and the token that only its own ranks know.

A run folder belongs to one attempt of one job. Whoever starts later takes it over by writing a new token; what is left of earlier attempts
sees that, and ends.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rlbatch.api import LaunchError
from rlbatch.launch.ranks.rank_info import RankInfo

ATTEMPT = "attempt.json"


@dataclass(frozen=True)
class Attempt:
    """Contents of attempt.json.

    Attributes:
        job_id: Id that the batch system or the launcher gave the job; empty if there is none.
        restart_count: How often the job was started again.
        launch: The word of this start, where its launcher or MPI gave one.
        world_size: Ranks.
        token: Random; the same on all ranks of this attempt.
        host: Rank 0's node.
        addresses: Where rank 0 may be reached, the most likely first.
        port: Its TCP port.
        pid: Rank 0's process.
    """

    job_id: str
    restart_count: int
    launch: str
    world_size: int
    token: str
    host: str
    addresses: tuple[str, ...]
    port: int
    pid: int

    @classmethod
    def from_json(cls, text: str) -> Attempt:
        """The attempt whose text ``to_json`` made.

        Raises:
            ValueError, TypeError, KeyError: something else, or another version.
        """
        content = json.loads(text)
        return cls(**(content | {"addresses": tuple(content["addresses"])}))

    def to_json(self) -> str:
        """Text of the file."""
        return json.dumps(asdict(self), indent=2) + "\n"

    def is_of(self, info: RankInfo, launch: str) -> bool:
        """Whether a rank is of this attempt, as far as its launcher's variables say. Words come before job ids: mpirun over ssh carries
        the variables of a batch system to some nodes only.
        """
        if self.launch and launch:
            return self.launch == launch
        return (self.job_id, self.restart_count) == (info.job_id, info.restart_count)

    def is_earlier_of(self, info: RankInfo) -> bool:
        """Whether this is an earlier attempt of a rank's job."""
        return bool(self.job_id) and self.job_id == info.job_id and self.restart_count < info.restart_count


def name_of(attempt: Attempt | RankInfo) -> str:
    """What messages call an attempt, or that of a rank."""
    job = f"job {attempt.job_id}" if attempt.job_id else "a job without id"
    return f"{job}, restart {attempt.restart_count}" if attempt.restart_count else job


def new_attempt(info: RankInfo, launch: str, addresses: Sequence[str], port: int) -> Attempt:
    """The attempt that rank 0 begins."""
    token = secrets.token_hex(16)
    return Attempt(info.job_id, info.restart_count, launch, info.world_size, token, info.host, tuple(addresses), port, os.getpid())


def write_attempt(run_dir: Path, attempt: Attempt) -> None:
    """Takes the run folder over, in one go."""
    draft = run_dir / f".{ATTEMPT}.{attempt.token[:8]}"
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(attempt.to_json())
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, run_dir / ATTEMPT)


def read_attempt(run_dir: Path) -> Attempt | None:
    """The folder's current attempt; None if there is none, or it is none of this version's.

    Raises:
        LaunchError: it is another user's, who could lead this rank anywhere.
    """
    os.listdir(run_dir)  # network file systems look again for names that were not there before
    path = run_dir / ATTEMPT
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), encoding="utf-8") as file:  # a FIFO has nobody who writes
            owner = os.fstat(file.fileno()).st_uid
            attempt = Attempt.from_json(file.read())
    except (FileNotFoundError, ValueError, TypeError, KeyError, RecursionError):
        return None
    if owner not in (os.getuid(), 0):
        raise LaunchError(f"{path}: belongs to user id {owner}, this process to {os.getuid()}. Use a run folder of your own.")
    return attempt


def is_superseded(run_dir: Path, token: str) -> bool:
    """Whether another attempt has taken the folder over. A folder that cannot be read says nothing."""
    try:
        attempt = read_attempt(run_dir)
    except (OSError, LaunchError):
        return False
    return attempt is not None and not same_token(attempt.token, token)


def same_token(first: object, second: str) -> bool:
    """Compares tokens without telling by the time how much of them agrees."""
    return hmac.compare_digest(*(str(token).encode("utf-8", "surrogatepass") for token in (first, second)))
