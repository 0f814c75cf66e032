"""Who a rank is, and how many GPUs it would see."""

from __future__ import annotations

import importlib.metadata

import pytest

from rlbatch.api import ConfigError
from rlbatch.launch.environment import RankInfo, visible_gpus

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


def test_torchrun_variables() -> None:
    """torchrun's variables say who a rank is; the node follows from them where GROUP_RANK is not set."""
    info = RankInfo.from_environment(TORCHRUN)
    assert (info.rank, info.world_size, info.local_rank, info.local_size, info.node_rank) == (5, 8, 1, 4, 1)
    assert (info.master_addr, info.master_port) == ("node0", 29500)
    assert RankInfo.from_environment({**TORCHRUN, "GROUP_RANK": "0"}).node_rank == 0
    assert RankInfo.from_environment(info.variables()) == info


@pytest.mark.parametrize("name", TORCHRUN)
def test_missing_variable(name: str) -> None:
    """Outside a job the error names the variable and the command that starts jobs."""
    with pytest.raises(
        ConfigError, match=rf"^{name}=: is not set, so this is no rank of a job\. Start jobs with `python -m rlbatch\.submit`"
    ):
        RankInfo.from_environment({key: value for key, value in TORCHRUN.items() if key != name})


def test_malformed_variable() -> None:
    """A variable that is no number is refused."""
    with pytest.raises(ConfigError, match=r"^RANK=first: must be a number"):
        RankInfo.from_environment({**TORCHRUN, "RANK": "first"})


@pytest.mark.parametrize(
    ("torch_version", "chosen", "gpus"),
    [("2.13.0+cpu", "0,1", 0), ("2.13.0", "0,1", 2), ("2.13.0", "", 0), ("2.13.0", "-1", 0), (None, "0,1,2", 3)],
)
def test_visible_gpus(monkeypatch: pytest.MonkeyPatch, torch_version: str | None, chosen: str, gpus: int) -> None:
    """CUDA_VISIBLE_DEVICES counts, unless the installed torch has no CUDA; without torch it still does."""

    def version(name: str) -> str:
        if torch_version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return torch_version

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert visible_gpus() == gpus
