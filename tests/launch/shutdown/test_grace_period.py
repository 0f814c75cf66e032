"""How early a job is told that its time ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlbatch.api import ConfigError
from rlbatch.config.machines import ClusterConfig, LaunchConfig
from rlbatch.config.schema import Config, TrainConfig
from rlbatch.launch.records.history import ATTEMPTS
from rlbatch.launch.shutdown.grace_period import MARGIN_S, SLOWER, notice_s, time_limit_s
from rlbatch.plan.checkpoint_size import checkpoint_bytes


def config(storage: float = 10.0, limit: str = "", asked: int | None = None) -> Config:
    cluster = ClusterConfig(storage_gbs=storage, time_limit=limit)
    return Config(train=TrainConfig(precision="bf16"), cluster=cluster, launch=LaunchConfig(notice_s=asked))


def test_size_of_a_checkpoint() -> None:
    """bf16: 2 + 4 + 4 + 4 bytes a parameter; 671 billion are 9.4 TB."""
    assert checkpoint_bytes(671e9, "bf16") == pytest.approx(9.394e12)
    assert checkpoint_bytes(1, "fp32") == 16


def test_notice_covers_the_write(tmp_path: Path) -> None:
    """The notice is the time of a slower write and a margin, in whole minutes."""
    seconds = notice_s(config(), 671e9, tmp_path)
    least = 671e9 * 14 / 10e9 * SLOWER + MARGIN_S
    assert least <= seconds < least + 60
    assert seconds % 60 == 0


def test_notice_goes_by_what_was_measured(tmp_path: Path) -> None:
    """A run that goes on knows how fast its checkpoints were written."""
    (tmp_path / ATTEMPTS).write_text(json.dumps({"attempts": [], "write_bytes": 10**12, "write_s": 1000.0}))
    assert notice_s(config(storage=10.0), 671e9, tmp_path) == notice_s(config(storage=1.0), 671e9, tmp_path / "new")


def test_notice_of_the_users(tmp_path: Path) -> None:
    """`launch.notice_s` counts, whatever the size."""
    assert notice_s(config(asked=45), 671e9, tmp_path) == 45


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (
            config(limit="00:20:00"),
            "cluster.time_limit=00:20:00: must be longer than 1320 s of notice before the end, for a checkpoint of 9394 GB (1e9 bytes) "
            "(cluster.storage_gbs=10). Use a longer limit",
        ),
        (config(limit="5", asked=300), "cluster.time_limit=5: must be longer than 300 s of notice"),
        (config(storage=0.1), "cluster.storage_gbs=0.1: means 117600 s of notice"),
    ],
)
def test_refused_notices(job: Config, message: str, tmp_path: Path) -> None:
    """A notice longer than the job, or than Slurm can say, is refused with the numbers and the key to change."""
    with pytest.raises(ConfigError) as caught:
        notice_s(job, 671e9, tmp_path)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("12:00:00", 43200),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("1-12:30:15", 131415),
        ("", None),
        ("UNLIMITED", None),
        ("infinite", None),
    ],
)
def test_time_limits(text: str, seconds: int | None) -> None:
    """Every form that sbatch's manual page names."""
    assert time_limit_s(text) == seconds


@pytest.mark.parametrize("text", ["1 day", "1:2:3:4", "12h", "-5", "1-", "1-2:3:4:5"])
def test_no_time_limit(text: str) -> None:
    """Anything else is refused with an example."""
    with pytest.raises(ConfigError, match=r"cluster\.time_limit=.*: must be a time such as 90 \(minutes\), 12:00:00"):
        time_limit_s(text)
