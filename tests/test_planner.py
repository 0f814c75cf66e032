"""`python -m rlbatch.plan`: a table for people, JSON for programs, refusals with what would do; no torch, no folder of a model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlbatch.config.sources import published_config
from rlbatch.plan.parameters import ModelSize
from rlbatch.planner import main
from rlbatch.registry import load_plugins
from tests.megatron.real_models import CONFIGS, PARAMETERS


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main([*arguments, "format=json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """MODEL_DIR names nothing."""
    for name in ("MODEL_DIR", "TRAIN_DATA", "EVAL_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("name", "published"), [("deepseek671b", "DeepSeek-V3"), ("qwen3_235b", "Qwen3-235B-A22B"), ("qwen3_30b", "Qwen3-30B-A3B")]
)
def test_shipped_models_need_no_folder(name: str, published: str) -> None:
    """Their config.json is here, as published."""
    fields = published_config(name)
    assert fields == CONFIGS[published]
    assert ModelSize(load_plugins().resolve_model_family(fields)).total.total == PARAMETERS[published]
    assert published_config("nothing") is published_config("") is None


def test_a_shipped_models_folder_may_be_elsewhere(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On the cluster, while the plan is made on a laptop: it is that of the published model, and says so. Any other must be there."""
    unnamed = planned(capsys, "+cluster=h100x8")
    monkeypatch.setenv("MODEL_DIR", "/models/Qwen3-30B-A3B")
    assert main(["+cluster=h100x8", "format=json"]) == unnamed[0]
    told = capsys.readouterr()
    assert json.loads(told.out) == unnamed[1]
    assert told.err == (
        "model.hf=/models/Qwen3-30B-A3B: is not on this machine. This is the plan of model=qwen3_30b as it was published.\n"
    )
    assert main(["experiment=hf", "model.hf=/models/mine", "layout.world_size=1"]) == 2


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Names that programs rely on; sizes of stages are sums of their parts."""
    code, said = planned(capsys, "+cluster=h20x64")
    assert (code, said["verdict"]) == (0, "fits")
    assert said["parameters"]["total"] == PARAMETERS["Qwen3-235B-A22B"]
    assert said["parameters"]["active"] == 22_190_763_520
    assert [stage["layers"] for stage in said["stages"]] == [11, *[12] * 6, 11]
    for stage in said["stages"]:
        assert stage["parameters"] == stage["dense"] + stage["experts"]
        for phase, gib in stage["gpu_gib"].items():
            assert gib == pytest.approx(sum(stage["gpu_parts_gib"][phase].values()))
    assert said["gpu_gib_peak"] == max(max(stage["gpu_gib"].values()) for stage in said["stages"])
    assert said["host_gib_per_node"] == pytest.approx(max(sum(parts.values()) for parts in said["host_parts_gib"].values()))
    assert said["step_seconds"] == pytest.approx(sum(said["phase_seconds"].values()))
    assert said["assumptions"]["cuda_gib"]["value"] == 2.0
    assert all(each["source"] for each in said["assumptions"].values())


def test_another_assumption(capsys: pytest.CaptureFixture[str]) -> None:
    """Its value counts, and it is said to be given."""
    before, after = (planned(capsys, "+cluster=h20x64", f"plan.assume.cuda_gib={gib}")[1] for gib in (2.0, 3.0))
    assert after["gpu_gib_peak"] == pytest.approx(before["gpu_gib_peak"] + 1)
    assert after["assumptions"]["cuda_gib"]["source"] == "given: plan.assume"


def test_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    """Verdict, needs, parameters, stages, parts, assumptions; what would fit."""
    assert main(["+cluster=h100x8", "rollout.engine.gpu_memory_utilization=0.9"]) == 2
    said = capsys.readouterr().out
    for words in (
        "Plan        does not fit",
        "Would fit   ",
        "Parameters  30,532,122,624 in all",
        "Stage ",
        "A GPU, in",
        "A node, of",
        "cuda_gib=2",
    ):
        assert words in said, words


def test_nothing_would_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """It is said, also by the search."""
    tiny = ["+cluster=h100x8", "cluster.gpu_memory_gib=6"]
    for question, words in (
        ("search=false", "Would fit   nothing of what was tried"),
        ("search=true", "Nothing of what was tried fits; engines had as many GPUs"),
    ):
        assert main([*tiny, question]) == 2
        assert words in capsys.readouterr().out


def test_the_search_is_asked_where_few_changes_do_not_help(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A job of one key, as one types it first: what would fit as many GPUs, also where engine and layout must both be others; its keys make
    a job that fits.
    """
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(CONFIGS["Qwen3-30B-A3B"]))
    own = ["model.hf=model", "data.train=x", "reward=number", "train.precision=bf16", "layout.world_size=16", "rollout=vllm"]
    own += ["cluster.gpu=H100", "cluster.gpu_memory_gib=79", "cluster.host_memory_gib=1000"]
    code, said = planned(capsys, *own)
    assert (code, said["verdict"], len(said["changes"])) == (2, "does not fit", 3)
    keys = [f"{key}={'null' if value is None else value}" for key, value in said["changes"][0]["keys"].items()]
    code, again = planned(capsys, *own, *keys)
    assert (code, again["verdict"], again["step_seconds"]) == (0, "fits", pytest.approx(said["changes"][0]["step_seconds"]))


def test_a_gpu_that_nobody_knows(capsys: pytest.CaptureFixture[str]) -> None:
    """Has no times, which is said with what would give them."""
    _, said = planned(capsys, "+cluster=h20x64", "layout=qwen3_235b_64xh20", "cluster.gpu=X1", "cluster.gpu_bf16_tflops=0")
    assert said["step_seconds"] is None
    assert any(
        problem.startswith("cluster.gpu=X1: what it can do is not known, so no time is. Use H100 or ") for problem in said["problems"]
    )


def test_a_folder_with_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Any model of a family, without weights and tokenizer; the GPUs are the cluster's, also where submit would start here."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(CONFIGS["Qwen3-8B"]))
    h100 = ["cluster.gpu=H100", "cluster.gpu_memory_gib=79", "cluster.host_memory_gib=1000", "reward=number", "data.train=x"]
    _, said = planned(capsys, "model.hf=model", "layout.world_size=8", "layout.tp_size=4", "train.precision=bf16", *h100)
    assert said["parameters"]["total"] == PARAMETERS["Qwen3-8B"] == said["parameters"]["active"]
    assert said["step_seconds"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["+cluster=h20x97"], "cluster=h20x97: unknown. Did you mean `h20x96`"),
        (["model=deepseek671"], "model=deepseek671: unknown. Did you mean `deepseek671b`"),
        (["+cluster=h20x96", "format=xml"], "format=xml: must be table, json or html. Choose one."),
        (["+cluster=h20x96", "serch=true"], "serch: unknown key. Did you mean `search`?"),
        (["+cluster=h20x96", "min_gpu=true"], "min_gpu: unknown key. Did you mean `min_gpus`?"),
        (["+cluster=h20x96", "search=yes"], "search=yes: must be false or true. Choose one."),
        (
            ["+cluster=h20x64", "layout=qwen3_235b_64xh20", "cluster.gpu=X1", "cluster.gpu_bf16_tflops=0", "search=true"],
            "search=true: cluster.gpu=X1 cluster.gpu_memory_gib=95 do not say what GPUs have and can do. Use +cluster=<name>, or",
        ),
        (["+cluster=h20x96", "verify=true", "search=true"], "verify: is another question than search. Ask one at a time."),
        (["+cluster=h20x96", "search=true", "format=html"], "format=html: of search there is table and json. Choose one."),
        (
            ["+cluster=h20x64", "rollout.options.gpus_per_engine=12"],
            "rollout.options.gpus_per_engine=12: must be at least 1 and divide layout.world_size=64. "
            "Use 4, 8 or 16, or another number of ranks.",
        ),
        (["+cluster=h20x96", "min_gpus=true", "mode=eval", "data.eval=x"], "min_gpus=true: compares training steps, mode=eval has none."),
        (["+cluster=h20x96", "layout.pp_size=4"], "layout.last_stage_layers=6: leaves 55 of 61 layers for 3 other stages"),
        (["+cluster=h20x96", "layout.world_size=0"], "layout.world_size=0: must be greater than 0"),
        (["+cluster=h20x96", "layout.tp_size=7"], "layout.tp_size=7: must divide num_attention_heads (128). Use 2, 4 or 8."),
        (["+cluster=h20x96", "layout.last_stage_layers=6.5"], "layout.last_stage_layers=6.5: must be an integer or null"),
        (["+cluster=h20x96", "plan.assume.cuda_gb=2"], "plan.assume.cuda_gb: unknown key. Did you mean `plan.assume.cuda_gib`"),
        (["+cluster=h20x96", "plan.assume.matmul_efficiency=1.5"], "plan.assume.matmul_efficiency=1.5: must be 1 or less"),
        (
            ["+cluster=h20x96", "rollout.max_response_tokens=4096", "plan.assume.mean_response_tokens=4097"],
            "plan.assume.mean_response_tokens=4097: must be at most rollout.max_response_tokens (4096). Use 4096 or less.",
        ),
        (
            ["+cluster=h20x96", "data.max_prompt_tokens=500", "plan.assume.mean_prompt_tokens=600"],
            "plan.assume.mean_prompt_tokens=600: must be at most data.max_prompt_tokens (500). Use 500 or less.",
        ),
        (["model.hf=nowhere", "data.train=x", "reward=number"], "nowhere/config.json: not there."),
    ],
)
def test_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Field, value, rule and what would do; nothing else."""
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_what_submit_would_refuse_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    """In the words of submit, beside the plan."""
    code, said = planned(capsys, "+cluster=h20x32", "offload=optimizer_state")
    assert code == 2
    assert any(problem.startswith("layout.world_size=32: a GPU needs at least 125.2 GiB in updates") for problem in said["problems"])


def test_a_program_without_torch() -> None:
    """The login node has none; nor is imported what only a job that starts needs, which takes a fifth of a plan's time."""
    blocked = "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'megatron', 'psutil', 'rlbatch.prepare')))\n"
    program = f"{blocked}from rlbatch.planner import main\nsys.exit(main(['+cluster=h20x64', 'format=json']))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["verdict"] == "fits"


def test_a_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a small model on two GPUs: the fastest first, with keys that make a plan which fits; and that one of them is enough, also where
    nobody says what the host has.
    """
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(CONFIGS["Qwen3-0.6B"]))
    own = ["model.hf=model", "data.train=x", "reward=number", "train.precision=bf16", "layout.world_size=2", "rollout=vllm"]
    own += ["cluster.gpu=H100", "cluster.gpu_memory_gib=79", "cluster.host_memory_gib=1000", "cluster.gpus_per_node=2"]
    code, said = planned(capsys, *own, "search=true")
    seconds = [each["step_seconds"] for each in said["best"]]
    assert (code, said["gpus"], seconds) == (0, 2, sorted(seconds))
    keys = [f"{key}={'null' if value is None else value}" for key, value in said["best"][0]["keys"].items()]
    code, again = planned(capsys, *own, *keys)
    assert (code, again["step_seconds"]) == (0, pytest.approx(seconds[0]))
    code, smallest = planned(capsys, *own, "min_gpus=true", "cluster.host_memory_gib=0")
    assert (code, smallest["gpus"], smallest["best"][0]["keys"]["layout.world_size"]) == (0, 1, 1)


def test_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    """On standard output."""
    assert main(["+cluster=h20x64", "format=html"]) == 0
    assert capsys.readouterr().out.startswith("<!DOCTYPE html>")


@pytest.mark.parametrize("layout", ["layout.pp_size=2", "layout.tp_size=2"])
def test_verified_by_megatron(layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tied embedding, twice in a pipeline; a divided vocabulary."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(CONFIGS["Qwen3-0.6B"]))
    assert main(["model.hf=model", "data.train=x", "reward=number", "layout.world_size=2", layout, "verify=true"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "The plan counts as Megatron builds"
    assert all(line.endswith("difference to the plan 0, 0") for line in said[:-1])
