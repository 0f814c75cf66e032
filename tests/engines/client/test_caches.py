"""Where engines keep what they compile."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlbatch.api import RolloutContext
from rlbatch.engines.client.caches import FOLDERS, cache_variables
from rlbatch_plugins.rollout_sglang import SglangOptions
from rlbatch_plugins.rollout_sglang import program as sglang
from rlbatch_plugins.rollout_vllm import VllmOptions
from rlbatch_plugins.rollout_vllm import program as vllm


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*FOLDERS, "VLLM_CACHE_ROOT", "SGLANG_DG_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)


def test_a_folder_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each library has a folder in it, but one whose variable the user has set; without a folder only what torch would lose is moved."""
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    places = cache_variables("/shared", {"ITS_OWN": "engine"})
    assert set(places) == {*FOLDERS, "ITS_OWN"} - {"TRITON_CACHE_DIR"}
    assert all(Path(place).parent == Path("/shared") for place in places.values())
    assert len(set(places.values())) == len(places)
    assert list(cache_variables("", {"ITS_OWN": "engine"})) == ["TORCHINDUCTOR_CACHE_DIR"]


def test_engines_are_told(tmp_path: Path) -> None:
    """Their own caches too; a variable of ``rollout.engine.environment`` counts more."""
    chosen = {"environment": {"TRITON_CACHE_DIR": "/mine"}}
    context = RolloutContext(tmp_path, "cpu", "float32", engine=chosen, folder=tmp_path)
    of_vllm = vllm(context, VllmOptions(cache_dir="/shared"), 0, ["cpu"]).variables
    of_sglang = sglang(context, SglangOptions(cache_dir="/shared"), ["cpu"]).variables
    assert of_vllm["VLLM_CACHE_ROOT"] == "/shared/vllm"
    assert of_sglang["SGLANG_DG_CACHE_DIR"] == of_vllm["DG_JIT_CACHE_DIR"] == "/shared/deep_gemm"
    assert of_vllm["TRITON_CACHE_DIR"] == of_sglang["TRITON_CACHE_DIR"] == "/mine"
    assert "VLLM_CACHE_ROOT" not in vllm(context, VllmOptions(), 0, ["cpu"]).variables
