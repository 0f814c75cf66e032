"""The command that compares a family with transformers: it passes what is right, and says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlbatch.registry import load_plugins
from rlbatch.testing import family
from tests.megatron.real_models import CONFIGS

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
WRONG = """
from dataclasses import replace
from rlbatch.api import hookimpl
from rlbatch_llama import llama

@hookimpl
def rlbatch_resolve_model_family(hf_config):
    return replace(llama(hf_config), rotary_base=9000.0) if hf_config.get("model_type") == "llama" else None
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With nothing but a config.json."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def results(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    return {line.split()[1]: line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")}


def test_a_family_from_outside(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the example: everything agrees, and a layout that a model without experts cannot have is no failure."""
    monkeypatch.setattr(family, "LAYOUTS", {name: family.LAYOUTS[name] for name in ("tp2", "ep2")})
    assert family.main([str(folder)]) == 0
    assert results(capsys) == {**dict.fromkeys(("logits", "gradients", "export", "round", "tp2"), "ok"), "ep2": "-"}


def test_a_family_that_is_wrong(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin that rotates by another base: its logits and gradients are not transformers', its tensors are."""
    (tmp_path / "wrong.py").write_text(WRONG)
    monkeypatch.setattr(family, "LAYOUTS", {})
    assert family.main([str(folder), f"plugins=[{tmp_path / 'wrong.py'}]", "num_hidden_layers=2"]) == 1
    assert results(capsys) == {"logits": "BAD", "gradients": "BAD", "export": "ok", "round": "ok"}


@pytest.mark.parametrize("name", CONFIGS)
def test_published_configs_become_tiny(name: str) -> None:
    """Every one is a model of its family afterwards, with no more than four layers and eight experts."""
    tiny = load_plugins().resolve_model_family(family.tiny_config(CONFIGS[name], {}))
    assert tiny.num_layers <= 4
    assert tiny.num_experts <= 8
    assert tiny.vocab_size == 61


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent"], "absent/config.json: not there."),
        (
            ["{folder}", "hidden_act=silu"],
            "hidden_act=silu: must be JSON (Expecting value: line 1 column 1",
        ),
        (["{folder}", "verbose"], "verbose: must be <field>=<value>."),
        (["{folder}", 'hidden_act="relu"'], "config.json hidden_act='relu': the llama family implements 'silu' only."),
        (["{folder}", "plugins=[absent.py]"], "absent.py"),
    ],
)
def test_refusals(arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One message, exit code 2."""
    assert family.main([argument.format(folder=folder) for argument in arguments]) == 2
    assert message in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    """Also without arguments, which is a mistake."""
    assert (family.main(["--help"]), family.main([])) == (0, 2)
    assert capsys.readouterr().out == family.HELP * 2
