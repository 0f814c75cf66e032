"""Counts how long before the time limit a job has to be told: long enough to write a checkpoint."""

from __future__ import annotations

import math
import re
from pathlib import Path

from rlbatch.api import ConfigError
from rlbatch.config.schema import Config
from rlbatch.launch.records.history import read_history
from rlbatch.plan.checkpoint_size import checkpoint_bytes

SLOWER = 1.25
"""Factor by which writing may be slower than it was measured, as others use the file system too."""
MARGIN_S = 120
"""Seconds for what is under way when the notice comes, and for ending."""
LONGEST_S = 65535
"""Seconds that Slurm allows ``--signal`` at most; ``launch.notice_s`` is within it."""

_TIME = re.compile(r"(?:(?P<days>\d+)-(?P<h>\d+)(?::(?P<m>\d+))?(?::(?P<s>\d+))?)|(?:(?P<a>\d+)(?::(?P<b>\d+))?(?::(?P<c>\d+))?)")
_ENDLESS = ("unlimited", "infinite", "-1")


def estimate_write_s(config: Config, num_parameters: float, run_dir: Path) -> float:
    """Seconds that a checkpoint takes: at the rate of this run's last one, else at ``cluster.storage_gbs``."""
    rate = read_history(run_dir).write_rate() or config.cluster.storage_gbs * 1e9
    return checkpoint_bytes(num_parameters, config.train.precision) / rate * SLOWER


def notice_s(config: Config, num_parameters: float, run_dir: Path) -> int:
    """Seconds between the signal that announces the time limit, and the limit: ``launch.notice_s``, else what a checkpoint takes.

    Raises:
        ConfigError: it is more than the job may run, or more than Slurm can say.
    """
    asked, rate = config.launch.notice_s, config.cluster.storage_gbs
    size = checkpoint_bytes(num_parameters, config.train.precision)
    seconds = asked if asked is not None else math.ceil((estimate_write_s(config, num_parameters, run_dir) + MARGIN_S) / 60) * 60
    how = f"launch.notice_s={seconds}" if asked is not None else f"cluster.storage_gbs={rate:g}"
    why = f"{seconds} s of notice before the end, for a checkpoint of {size / 1e9:.0f} GB (1e9 bytes)"
    if seconds > LONGEST_S:
        raise ConfigError(
            f"{how}: means {why}, Slurm announces at most {LONGEST_S} s. "
            "Correct it to what all nodes write together, or set launch.notice_s."
        )
    limit = time_limit_s(config.cluster.time_limit)
    if limit is not None and seconds >= limit:
        raise ConfigError(
            f"cluster.time_limit={config.cluster.time_limit}: must be longer than {why} ({how}). "
            "Use a longer limit, or set launch.notice_s to less."
        )
    return seconds


def time_limit_s(text: str) -> int | None:
    """Seconds of a Slurm time limit: ``minutes``, ``minutes:seconds``, ``hours:minutes:seconds``, ``days-hours[:minutes[:seconds]]``.

    Returns:
        None: the partition's, or none.

    Raises:
        ConfigError: it is not of one of these forms.
    """
    if not text or text.lower() in _ENDLESS:
        return None
    match = _TIME.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"cluster.time_limit={text}: must be a time such as 90 (minutes), 12:00:00 or 1-12:00:00 (days-hours:minutes:seconds). "
            "Write it so, in quotes if it is a number."
        )
    part = {name: int(value or 0) for name, value in match.groupdict().items()}
    if match["days"]:
        return ((part["days"] * 24 + part["h"]) * 60 + part["m"]) * 60 + part["s"]
    if match["c"]:
        return (part["a"] * 60 + part["b"]) * 60 + part["c"]
    return part["a"] * 60 + part["b"]
