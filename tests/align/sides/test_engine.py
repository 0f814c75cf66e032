"""Engines beside transformers, with real ones on CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlbatch.align import __main__ as command
from tests.plugins import sglang_cases, vllm_cases


def said(capsys: pytest.CaptureFixture[str], hf: Path, *arguments: str) -> tuple[int, str]:
    code = command.main([f"hf={hf}", "layouts=[]", "lengths=[6,11]", *arguments])
    return code, capsys.readouterr().out


@pytest.mark.long("align", "sglang")
def test_sglang_agrees(repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Log-probs of what it sampled, and the experts that it tells, in every layer; transformers as an engine too, and one that has no
    interpreter is named while the others go on.
    """
    hf = sglang_cases.write_model("qwen3_moe", tmp_path / "model")
    own = {"sglang": {"python": sglang_cases.sglang_python(repository)}, "vllm": {"python": "/no/python"}}
    code, text = said(capsys, hf, "engines=[vllm,transformers,sglang]", f"engine={json.dumps(own)}", f"out={tmp_path / 'page.html'}")
    assert code == 1
    assert "vllm fp32: did not run: rollout.engine.python=/no/python: cannot be started" in text
    for name in ("transformers", "sglang"):
        assert f"{name} fp32: agrees everywhere up to rounding" in text
        table = text.partition(f"{name} fp32: agrees")[2]
        assert "logprobs" in table.partition("\n\n")[0]
    assert "sglang fp32" in (tmp_path / "page.html").read_text()


@pytest.mark.long("align", "vllm")
def test_a_wrong_rotary_base_in_vllm(repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Right it agrees; with another base its log-probs are the first to differ: it shows nothing else."""
    hf = vllm_cases.write_model("qwen3_moe", tmp_path / "model")
    python = vllm_cases.vllm_python(repository)
    right = {"vllm": {"python": python}}
    assert said(capsys, hf, "engines=[vllm]", f"engine={json.dumps(right)}")[0] == 0
    wrong = {"vllm": {"python": python, "hf_overrides": {"rope_parameters": {"rope_theta": 50.0, "rope_type": "default"}}}}
    code, text = said(capsys, hf, "engines=[vllm]", f"engine={json.dumps(wrong)}")
    assert code == 1
    assert "vllm fp32: the output layer's log-probs is the first to differ" in text
    assert "Kind: not located: the side shows neither what enters this place" in text


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A backend that there is not, options of one that is not asked for, and engines beside another checkpoint."""
    hf = vllm_cases.write_model("qwen3_moe", tmp_path / "model")
    for arguments, message in (
        (("engines=[vlm]",), "engines=vlm: unknown. Did you mean `vllm`"),
        (("engine={vllm: {python: x}}", "engines=[sglang]"), "engine.vllm={python:x}: must be options of one of engines."),
        ((f"beside={hf}", "engines=[vllm]"), "engines: not used with beside="),
        (("layouts=[]",), "layouts=[]: must name at least one, or engines must."),
    ):
        assert command.main([f"hf={hf}", *arguments]) == 2
        assert message in capsys.readouterr().err
