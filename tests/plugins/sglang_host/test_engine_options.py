"""SGLang's version and options, known before it is started."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlbatch.api import ConfigError, RolloutContext
from rlbatch.engines.client.interpreter import inspect_interpreter
from rlbatch.engines.protocol.frames import Refused
from rlbatch.prepare import find_problems
from rlbatch.registry import compose_job
from rlbatch_plugins.rollout_sglang import SglangOptions, check_engine, engine_shape, program
from rlbatch_plugins.sglang_host.engine import SglangEngine
from rlbatch_plugins.sglang_host.engine_options import CLASSES, DECIDED, SOURCE, UNSAFE, unsafe
from tests.plugins.sglang_cases import sglang_python

UNQUANTISED = "weights are synced as they are trained, and a quantised engine has no place for them"
STALE = "this cache outlives a sync: samples would go on from keys and values of older weights"
REFUSED = {
    "quantization=fp8": "rollout.quantization, which is none for SGLang, decides it. Leave it out.",
    "torchao_config=int8wo": f"{UNQUANTISED}. Leave it out.",
    "load_format=flash_rl": f"{UNQUANTISED}. Leave it out.",
    "sampling_backend=flashinfer": "only pytorch draws a sample's tokens by its seed. Use pytorch, or leave it out.",
    "rl_on_policy_target=fsdp": "SGLang's own seeded draw, which it uses, takes a random token now and then. Leave it out.",
    "moe_runner_backend=flashinfer_trtllm": (
        "it packs experts once, after they are loaded, and synced ones would lie there unpacked. Use triton."
    ),
    "offload_mode=shm_cpu": "it computes with copies of the weights that a sync does not reach. Use cpu.",
    "hicache_storage_backend=file": f"{STALE}. Leave it out.",
    "enable_lmcache=True": f"{STALE}. Leave it out.",
    "allow_auto_truncate=True": "a prompt that SGLang cuts would be trained whole. Leave it out.",
    "enable_lora=True": "rlbatch trains no adapters and asks for none. Leave it out.",
    "environment={SGLANG_RETURN_ORIGINAL_LOGPROB: 1}": (
        "log-probs must be of the distribution that was sampled, at rollout.temperature, and would be of the one before it. Leave it out."
    ),
    "mem_fraction_static=1.5": "must be above 0 and at most 1. Use e.g. 0.6.",
}


def test_its_source_has_what_rlbatch_speaks_of(repository: Path) -> None:
    """What rlbatch decides and refuses are options of this SGLang; a misspelt one is named with the closest."""
    python = sglang_python(repository)
    known = inspect_interpreter(python, ("sglang",), SOURCE, CLASSES).options
    assert {*DECIDED, *UNSAFE} <= set(known)
    check_engine(SglangOptions(), {"python": python, "max_running_requests": 4})
    with pytest.raises(ConfigError, match=r"max_running_request=4: SGLang \S+ has no such option\. Did you mean `max_running_requests`"):
        check_engine(SglangOptions(), {"python": python, "max_running_request": 4})


@pytest.mark.parametrize("version", ["0.5.14", "0.5.16.post1", "0.6", "dev"])
def test_other_versions_are_refused(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what is there, what is supported, and what to install."""
    installed(version, tmp_path, monkeypatch)
    with pytest.raises(
        ConfigError, match=rf"^rollout=sglang: \S+ has SGLang {version}, supported is 0\.5\.15\. Install sglang 0\.5\.15\.post1 there, "
    ):
        check_engine(SglangOptions(), {})


@pytest.mark.parametrize("version", ["0.5.15", "0.5.15.post1"])
def test_these_versions_are_accepted(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes after the first three numbers."""
    installed(version, tmp_path, monkeypatch)
    check_engine(SglangOptions(), {})


def installed(version: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the tests' own interpreter have an SGLang of a version, by name only."""
    (folder / f"sglang-{version}.dist-info").mkdir()
    (folder / f"sglang-{version}.dist-info/METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.mark.parametrize(("override", "why"), list(REFUSED.items()), ids=[override.partition("=")[0] for override in REFUSED])
def test_submit_refuses_what_would_make_samples_wrong(override: str, why: str) -> None:
    """Weights that a sync does not reach, tokens that are not a sample's own, log-probs of another distribution."""
    asked = override.replace(": ", ":")
    problems = [str(problem) for problem in find_problems(*compose_job(["rollout=sglang", f"rollout.engine.{asked}"]))[0]]
    assert f"rollout.engine.{override}: {why}" in problems


@pytest.mark.parametrize(
    "options",
    [
        {"sampling_backend": "pytorch", "load_format": "auto", "moe_runner_backend": "triton", "offload_mode": "cpu", "cpu_offload_gb": 4},
        {"kv_cache_dtype": "fp8_e5m2", "enable_hierarchical_cache": True, "enable_deterministic_inference": True, "enable_lora": False},
        {"torchao_config": "", "rl_on_policy_target": None, "environment": {"A": "1"}},
    ],
)
def test_what_changes_no_meaning_is_accepted(options: dict[str, Any]) -> None:
    """Among it the defaults of what is refused otherwise."""
    engine_shape(SglangOptions(), options)
    assert not unsafe(options)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_tokens_are_drawn_by_their_seeds_everywhere(device: str) -> None:
    """SGLang's own choice on GPUs fails as soon as a batch has greedy and other requests; its log-probs are after the temperature."""
    made = program(RolloutContext(Path("/models/m"), device, "bfloat16"), SglangOptions(), [device])
    assert made.start["defaults"]["sampling_backend"] == "pytorch"
    assert made.variables["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "false"


@pytest.mark.parametrize(
    ("changed", "quantization", "message"),
    [
        ({}, None, ""),
        (
            {"moe_runner_backend": "flashinfer_trtllm"},
            None,
            r"moe_runner_backend=flashinfer_trtllm: .* Use triton\. SGLang chose it itself\.",
        ),
        (
            {"json_model_override_args": "{...}"},
            "fp8",
            r"json_model_override_args=\{\.\.\.\}: weights are synced .* would be fp8\. Leave `quant",
        ),
    ],
)
def test_what_sglang_chooses_is_looked_at(changed: dict[str, Any], quantization: str | None, message: str) -> None:
    """On Blackwell it packs experts, and a model's description may be told to be quantised: such an engine does not go on."""
    chosen = {
        "sampling_backend": "pytorch",
        "load_format": "dummy",
        "moe_runner_backend": "auto",
        "json_model_override_args": "{}",
        **changed,
    }
    manager = SimpleNamespace(model_config=SimpleNamespace(quantization=quantization))
    engine = SglangEngine()
    engine._engine = SimpleNamespace(server_args=SimpleNamespace(**chosen), tokenizer_manager=manager)
    with pytest.raises(Refused, match=message) if message else nullcontext():
        engine._check_choices()
