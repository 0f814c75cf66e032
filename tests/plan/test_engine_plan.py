"""What submit says of engines without a place, for each backend in the words of its engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import rlbatch.submit
from rlbatch.api import ConfigError, EngineShape
from rlbatch.config.compose import compose
from rlbatch.job_parts import placement
from rlbatch.plan.engine_memory import memory_inputs
from rlbatch.plan.engine_plan import EnginePlan
from rlbatch.prepare import find_problems
from rlbatch.registry import compose_job, load_plugins
from tests.large_models import CONFIGS, write_model

REGISTRY = load_plugins()
JOB = ("+cluster=h100x8", "rollout.options.gpus_per_engine=4", "offload=optimizer_state")
"""qwen3_30b on 8 GPUs of 79 GiB, where the trainer keeps 23.8 and leaves 55.2; an engine has 14.2 GiB of weights on each of its 4."""


Refusals = Callable[..., str]


@pytest.fixture
def refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refusals:
    """What a dry run of `JOB` prints as refused; empty: nothing is."""
    monkeypatch.setenv("MODEL_DIR", str(write_model("qwen3_30b", tmp_path / "model")))
    monkeypatch.setenv("TRAIN_DATA", str(tmp_path / "train.jsonl"))
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "label": "1"}\n' * 512)

    def refused(*overrides: str) -> str:
        code = rlbatch.submit.main([*JOB, *overrides, f"run_dir={tmp_path}/run", "dry_run=true"])
        said = capsys.readouterr().err
        assert code == (2 if said else 0)
        return said

    return refused


@pytest.mark.parametrize(
    ("backend", "option", "spare", "said"),
    [("vllm", "max_model_len", 0, ""), ("sglang", "context_length", 2, ", and 2 that the engine keeps")],
)
def test_a_context_too_short(backend: str, option: str, spare: int, said: str) -> None:
    """The engine's own option is named, with the least that would do; that much is accepted."""
    job = (f"rollout={backend}", "rollout.max_response_tokens=8", "data.max_prompt_tokens=3")
    refused = (
        f"rollout.engine.{option}={10 + spare}: must hold a prompt of 3 tokens (data.max_prompt_tokens) and a response of 8 "
        f"(rollout.max_response_tokens){said}. Use {11 + spare} or more."
    )
    for tokens in (10 + spare, 11 + spare):
        problems = find_problems(*compose_job([*job, f"rollout.engine.{option}={tokens}"]))[0]
        assert (refused in map(str, problems)) == (tokens == 10 + spare)
        assert not any(word in str(problem) for problem in problems for word in ("max_model_len", "context_length") if word != option)


def test_a_share_of_what_is_free(refusals: Refusals) -> None:
    """SGLang's share is one of what the trainer leaves: 0.9 of it fits, where 0.9 of vLLM's GPU does not, and is called by its own name."""
    assert refusals("rollout=sglang", "rollout.engine.mem_fraction_static=0.9") == ""
    assert (
        "rollout.engine.gpu_memory_utilization=0.9: the engine takes 71.1 of a GPU's 79 GiB (cluster.gpu_memory_gib), and the trainer "
        "keeps 23.8 there. Use 0.67 or less, or keep more of the trainer on the host."
    ) in refusals("rollout=vllm", "rollout.engine.gpu_memory_utilization=0.9")


@pytest.mark.parametrize(
    ("backend", "option", "share", "has"), [("vllm", "gpu_memory_utilization", 0.15, 11.8), ("sglang", "mem_fraction_static", 0.25, 13.8)]
)
def test_a_share_too_small(backend: str, option: str, share: float, has: float, refusals: Refusals) -> None:
    """What an engine needs and has, of the whole GPU (vLLM) or of what the trainer leaves (SGLang); a larger engine of the same backend
    would do, or a larger share, by the name that its engine has for it.
    """
    said = refusals(f"rollout={backend}", f"rollout.engine.{option}={share}")
    assert f"on each of its 4 GPUs, and has {has} of 79 GiB (cluster.gpu_memory_gib), where the trainer keeps 23.8." in said
    assert said.rstrip().endswith(f"Use rollout={backend} rollout.options.gpus_per_engine=8, or raise rollout.engine.{option}.")


def test_what_is_told_of_a_share_of_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same in what a dry run shows of an accepted job: engine, trainer and what is left are the whole GPU."""
    monkeypatch.setenv("MODEL_DIR", str(write_model("qwen3_30b", tmp_path / "model")))
    config, registry = compose_job([*JOB, "rollout=sglang", "rollout.engine.mem_fraction_static=0.9", "data.train=x"])
    plan = EnginePlan(config, registry, 4, registry.engine_shape(config), placement(config, registry))
    told = plan.memory_line(memory_inputs(config, registry, registry.resolve_model_family(CONFIGS["qwen3_30b"]), on_gpu=True))
    assert told.startswith("of 79 GiB a GPU: engine 49.6 (")
    assert told.endswith("trainer 23.8 while it generates, free 5.5")


def test_heads_without_a_kernel() -> None:
    """An engine that has kernels for some sizes of heads says on CPUs which, also where the size follows from others; latent attention and
    GPUs have their own.
    """
    plan = EnginePlan(compose(["rollout=vllm"]), REGISTRY, 1, EngineShape(cpu_head_sizes=(32, 64)), None)
    qwen = REGISTRY.resolve_model_family(CONFIGS["qwen3_30b"])
    with pytest.raises(
        ConfigError, match=r"^rollout=vllm: model\.hf's attention heads have size 128, on CPUs the engine has kernels for 32, 64\."
    ):
        plan.check_heads(qwen, on_gpu=False)
    derived = {name: size for name, size in qwen.transformer.items() if name != "kv_channels"} | {
        "hidden_size": 40,
        "num_attention_heads": 2,
    }
    with pytest.raises(ConfigError, match=r"have size 20, on CPUs"):
        plan.check_heads(replace(qwen, transformer=derived), on_gpu=False)
    plan.check_heads(qwen, on_gpu=True)
    plan.check_heads(REGISTRY.resolve_model_family(CONFIGS["deepseek671b"]), on_gpu=False)
    replace(plan, shape=EngineShape()).check_heads(qwen, on_gpu=False)


def test_heads_that_cannot_be_divided() -> None:
    """Each GPU of a copy has as many attention heads; copies have all of them."""
    family = REGISTRY.resolve_model_family(CONFIGS["qwen3_30b"])
    odd = replace(family, transformer={**family.transformer, "num_attention_heads": 28})
    said = r"^rollout\.options\.gpus_per_engine=16: divides layers over 8 GPUs, which .* \(28\)\. Use 2 or 4 or 8\.$"
    config = REGISTRY.complete(compose(["+cluster=h20x16", "rollout.options.gpus_per_engine=16", "rollout.engine.data_parallel_size=2"]))
    plan = EnginePlan(config, REGISTRY, 16, EngineShape(8, replicas=2), None)
    with pytest.raises(ConfigError, match=said):
        plan.check_heads(odd, on_gpu=True)
    for fitting in (EngineShape(4, replicas=4), EngineShape(8, replicas=2, stages=2)):
        replace(plan, shape=fitting).check_heads(odd, on_gpu=True)
