"""The registry of SGLang's faults: each is there without its workaround, and gone with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlbatch.engines.host.workarounds import Workaround, apply_those_for
from rlbatch_plugins.sglang_host.workarounds import WORKAROUNDS
from tests.plugins.sglang_cases import said_by

LIKELY, UNLIKELY = 5, 1208


@pytest.fixture(scope="module")
def seen(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process of SGLang's interpreter saw, before and after it applied the workarounds."""
    return said_by("sglang_faults.py", repository, tmp_path_factory.mktemp("faults"), TRITON_INTERPRET="1", TORCHDYNAMO_DISABLE="1")


def test_seeded_draws_take_likely_tokens(seen: dict[str, Any]) -> None:
    """SGLang's own takes a token of probability e^-60 if its hash is the largest number; with the workaround the likely one."""
    assert seen["before"]["likely"] == UNLIKELY
    assert seen["after"]["likely"] == LIKELY


def test_seeded_draws_are_alike_in_every_batch(seen: dict[str, Any]) -> None:
    """SGLang's own draws other tokens while a greedy request is in the batch; with the workaround the same."""
    assert seen["before"]["alike"] < 0.5
    assert seen["after"]["alike"] == 1.0


def test_halves_that_come_in_different_calls(seen: dict[str, Any]) -> None:
    """SGLang's loader forgets both, as the audit says; with the workaround the parameter has both, whatever the first's memory is then."""
    assert seen["before"]["pair"] == [0.0] * 5
    assert "fused_qkv_a_proj_with_mqa.weight (15 of 15 values) is not written" in seen["before"]["audit"]
    assert seen["after"]["pair"] == [2.0] * 2 + [3.0] * 3
    assert seen["after"]["audit"] == ""


def test_the_file_of_the_load_is_private(seen: dict[str, Any]) -> None:
    """A closed engine's is in /dev/shm; with the workaround it never was."""
    assert seen["before"]["load_file"] == ["sglang"]
    assert seen["after"]["load_file"] == []


def test_what_a_killed_engine_leaves_is_removed(seen: dict[str, Any]) -> None:
    """Its buffer stays in /dev/shm, which the next engine cannot tell from others' memory; with the workaround that one removes it."""
    assert seen["before"]["killed"] == ["sgl_shm"]
    assert seen["after"]["killed"] == []


def test_stores_at_their_address(seen: dict[str, Any]) -> None:
    """torch's stores listen at all addresses; with the workaround at the one that they are told."""
    assert seen["before"]["store"] == ["::"]
    assert seen["after"]["store"] == ["127.0.0.1"]


def test_other_versions_are_warned_about(seen: dict[str, Any]) -> None:
    """A workaround that was not made for this version is not applied, and the log says which, why and where to look."""
    assert seen["other_version"] == sorted(workaround.name for workaround in WORKAROUNDS)
    assert len(seen["other_version"]) == 5


def test_skipped_workarounds_are_not_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the variable names, in this process as in SGLang's."""
    done: list[str] = []

    def one() -> None:
        done.append("one")

    def two() -> None:
        done.append("two")

    registry = [Workaround(one, (1,), (2,), "", ""), Workaround(two, (1,), (2,), "", "")]
    monkeypatch.setenv("SKIPPED", "two,three")
    applied: set[str] = set()
    for _ in range(2):
        apply_those_for("engine 2", (2,), registry, "SKIPPED", applied, done.append)
    assert done == ["one"]
