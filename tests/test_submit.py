"""The command `python -m rlbatch.submit`, up to the point where ranks start."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import rlbatch.prepare
import rlbatch.start
import rlbatch.submit
from rlbatch.config.compose import compose, load_config
from rlbatch.config.schema import Config, OptimizerConfig, RolloutConfig, TrainConfig
from rlbatch.config.structured import key_docs
from tests.large_models import write_no_weights, write_tokenizer

QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
    "eos_token_id": 0,
}


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Config, Path]]:
    """Works in an empty folder without GPUs and collects what would be started."""
    jobs: list[tuple[Config, Path]] = []

    def run_local(config: Config, run_dir: Path, command: Sequence[str], *, is_run: bool) -> int:
        jobs.append((config, run_dir))
        return 0

    monkeypatch.setattr(rlbatch.start, "run_local", run_local)
    monkeypatch.setattr(rlbatch.prepare, "visible_gpus", lambda: 0)
    monkeypatch.chdir(tmp_path)
    return jobs


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A Hugging Face folder as far as submit looks at it."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3_MOE))
    write_tokenizer(folder)
    write_no_weights(folder)
    return folder


def refusal(capsys: pytest.CaptureFixture[str], overrides: Sequence[str]) -> str:
    """The message of a job that is refused with exit code 2."""
    assert rlbatch.submit.main(overrides) == 2
    return capsys.readouterr().err


def test_embedded_run(started: list[tuple[Config, Path]], tmp_path: Path) -> None:
    """Without arguments: a private run folder with the resolved config and the generated task, then the ranks."""
    assert rlbatch.submit.main([]) == 0
    [(config, run_dir)] = started
    assert run_dir.parent == tmp_path / "runs"
    assert re.fullmatch(r"\d{8}-\d{6}", run_dir.name)
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    assert load_config(run_dir / "config.yaml") == config
    assert config.run_dir == str(run_dir)
    assert (run_dir / "embedded/model/config.json").is_file()
    assert (run_dir / "embedded/train.jsonl").is_file()


def test_two_runs_in_one_second(started: list[tuple[Config, Path]]) -> None:
    """Runs that start in the same second have folders of their own."""
    for _ in range(3):
        assert rlbatch.submit.main([]) == 0
    assert len({run_dir for _, run_dir in started}) == 3


def test_hf_folder(started: list[tuple[Config, Path]], model: Path, tmp_path: Path) -> None:
    """A model folder and prompt files of one's own start without anything embedded."""
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "label": "b"}\n' * 4)
    overrides = [f"model.hf={model}", "data.train=train.jsonl", "train.prompts_per_step=4", "run_dir=new/run"]
    assert rlbatch.submit.main([*overrides, "reward=sequence"]) == 0
    [(config, run_dir)] = started
    assert run_dir == tmp_path / "new/run"
    assert not (run_dir / "embedded").exists()
    own = (config.optimizer, config.rollout.max_response_tokens, config.layout.world_size, config.data.eval, config.train.steps)
    assert own == (OptimizerConfig(), RolloutConfig().max_response_tokens, 1, "", TrainConfig().steps)


@pytest.mark.parametrize("experiment", [[], ["experiment=hf"]])
def test_nothing_embedded_for_a_model_of_ones_own(
    started: list[tuple[Config, Path]], capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path, experiment: list[str]
) -> None:
    """Neither its reward, which would be 0 for ever, nor its prompts."""
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "label": "b"}\n' * 4)
    overrides = [*experiment, f"model.hf={model}", "train.prompts_per_step=4"]
    assert refusal(capsys, [*overrides, "data.train=train.jsonl"]).startswith(
        "reward=: must be named for a model of your own. Known: choice, code, composite, exact, gsm8k, length, math, number, regex, "
    )
    assert refusal(capsys, [*overrides, "reward=sequence"]).startswith("data.train=embedded: its prompts are for model.hf=embedded.")
    overrides += ["reward=sequence", "data.train=train.jsonl"]
    assert refusal(capsys, [*overrides, "data.eval=embedded"]).startswith("data.eval=embedded: its prompts are for model.hf=embedded.")
    assert started == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trian.steps=3"], "trian.steps: unknown key. Did you mean `train.steps`"),
        (["reward=squence"], "reward=squence: unknown. Did you mean `sequence`"),
        (["plugins=[absent.py]"], "/absent.py]: there is no such file"),
        (["layout.world_size=3"], "layout.world_size=3: must be a multiple of pp_size x ep_size x etp_size"),
        (["layout.ep_size=3"], "layout.ep_size=3: must divide num_experts (4). Use 1, 2 or 4."),
        (
            ["layout.tp_size=2", "layout.ep_size=1"],
            "layout.etp_size=1: with ep_size 1 it must equal tp_size (2), else stock Megatron's expert gradients are silently wrong",
        ),
        (["model.hf=absent"], "absent/config.json: not there. A Hugging Face folder holds"),
        (["model.hf=Qwen/Qwen3-30B-A3B"], "Nothing is downloaded: `hf download <name> --local-dir <folder>` does that."),
        (["data.train=absent.jsonl"], "absent.jsonl"),
        (["data.train=empty.jsonl"], "empty.jsonl:1: "),
        (["data.eval=malformed.jsonl"], "malformed.jsonl:2: "),
        (["eval.sets.a.file=absent.jsonl"], "absent.jsonl"),
        (["eval.sets.a.file=empty.jsonl"], "empty.jsonl:1: "),
        (["eval.sets.a.file=malformed.jsonl"], "malformed.jsonl:2: "),
        (["eval.sets.a.file=one.jsonl", "eval.sets.a.reward=nope"], "eval.sets.a.reward=nope: unknown. "),
        (["eval.sets.a.file=one.jsonl", "eval.sets.a.reward=number"], "one.jsonl:1: reward=number: label 'b'"),
        (
            ["eval.sets.a.file=one.jsonl", "eval.sets.a.reward=number", "eval.sets.a.reward_options.limit=1"],
            "eval.sets.a.reward_options.limit: unknown key.",
        ),
        (
            ["eval.sets.a.file=embedded", "eval.sets.a.max_response_tokens=64"],
            "eval.sets.a.max_response_tokens=64: must leave room for a prompt in the model's context (64 tokens). Use less.",
        ),
        (
            ["eval.sets.a.file=long.jsonl", "eval.sets.a.max_response_tokens=60"],
            "long.jsonl:1: 5 tokens: 1 of 1 prompts are longer than 4 tokens (the context of 64 less eval.sets.a.max_response_tokens=60). ",
        ),
        (
            ["eval.sets.a.file=some.jsonl", "eval.sets.a.max_response_tokens=60", "data.too_long=refuse"],
            "some.jsonl:2: 5 tokens: 1 of 3 prompts are longer than 4 tokens (the context of 64 less eval.sets.a.max_response_tokens=60). ",
        ),
        (["mode=eval", "checkpoint.load=absent"], "/absent: there is no such folder."),
        (["data.train=rewards.jsonl"], "rewards.jsonl:1: reward `nope` is unknown. Known: "),
        (["data.train=", "data.sets.a.path=one.jsonl", "data.sets.a.reward=nope"], "data.sets.a.reward=nope: unknown. "),
        (
            ["data.train=one.jsonl"],
            "train.prompts_per_step=64: must be at most the prompts of data.train (1). Use 1 or less, or add prompts.",
        ),
        (
            ["rollout.max_response_tokens=64"],
            "rollout.max_response_tokens=64: must leave room for a prompt in the model's context (64 tokens). Use less.",
        ),
        (["checkpoint.load=absent"], "/absent: there is no such folder."),
        (["checkpoint.ref_load=absent"], "/absent: there is no such folder."),
    ],
)
def test_bad_input(
    started: list[tuple[Config, Path]], capsys: pytest.CaptureFixture[str], tmp_path: Path, overrides: list[str], message: str
) -> None:
    """Bad input is one message on stderr and exit code 2; nothing is started and no run folder is left."""
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "malformed.jsonl").write_text('{"prompt": "a", "label": "b"}\n{"prompt": \n')
    (tmp_path / "rewards.jsonl").write_text('{"prompt": "a", "label": "b", "reward": "nope"}\n' * 40)
    (tmp_path / "one.jsonl").write_text('{"prompt": "a", "label": "b"}\n')
    (tmp_path / "long.jsonl").write_text('{"prompt": "a b c d =", "label": "b"}\n')
    (tmp_path / "some.jsonl").write_text("".join(f'{{"prompt": "{prompt}", "label": "b"}}\n' for prompt in ("a", "a b c d =", "b")))
    stderr = refusal(capsys, overrides)
    assert stderr.startswith(message) or message in stderr
    assert "Traceback" not in stderr
    assert started == []
    assert not list((tmp_path / "runs").glob("*"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "config.json:1: not JSON"),
        ("{}", "config.json model_type: is missing, and says which family"),
        ('{"model_type": "gpt9"}', "model.hf: no plugin claims model_type `gpt9`."),
        (json.dumps({**QWEN3_MOE, "hidden_act": "relu"}), "hidden_act"),
    ],
)
def test_bad_model_folder(capsys: pytest.CaptureFixture[str], model: Path, content: str, message: str) -> None:
    """A model folder that cannot be trained is refused with the reason."""
    (model / "config.json").write_text(content)
    assert message in refusal(capsys, [f"model.hf={model}"])


def test_model_folder_without_weights(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    """Weights that are missing are noticed before the job starts."""
    (model / "model.safetensors").unlink()
    assert "has no *.safetensors" in refusal(capsys, [f"model.hf={model}"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.safetensors", b"", "model.safetensors: is truncated or damaged"),
        ("model.safetensors", (10**5).to_bytes(8, "little") + b"[" * 10**5, "model.safetensors: header:1: must not have lists and objects"),
        ("model.safetensors.index.json", b"[" * 10**5, "model.safetensors.index.json:1: must not have lists and objects"),
        ("generation_config.json", b'{"eos_token_id": 0,}', "generation_config.json:1: not JSON"),
        ("tokenizer.json", b"[" * 10**5, "tokenizer.json:1: must not have lists and objects"),
    ],
)
def test_model_folder_with_a_damaged_file(
    capsys: pytest.CaptureFixture[str], model: Path, name: str, content: bytes, message: str, started: list[tuple[Config, Path]]
) -> None:
    """What ranks would fail at, once they had built the model."""
    (model / name).write_bytes(content)
    assert message in refusal(capsys, [f"model.hf={model}"])
    assert started == []


def test_model_folder_with_links_out_of_it(capsys: pytest.CaptureFixture[str], model: Path, started: list[tuple[Config, Path]]) -> None:
    """What exports would publish of this machine is refused before the job starts."""
    (model / "special.txt").symlink_to("/proc/self/environ")
    assert f"{model / 'special.txt'}: is a link to /proc/" in refusal(capsys, [f"model.hf={model}"])
    assert started == []


def test_weights_from_elsewhere(capsys: pytest.CaptureFixture[str], model: Path, started: list[tuple[Config, Path]]) -> None:
    """With checkpoint.load model.hf needs none, unless a reference model is loaded from it."""
    (model / "model.safetensors").unlink()
    (model / "train.jsonl").write_text('{"prompt": "a", "label": "b"}\n' * 32)
    (model / "weights").mkdir()
    write_no_weights(model / "weights")
    elsewhere = [f"model.hf={model}", f"checkpoint.load={model / 'weights'}", "reward=sequence", f"data.train={model / 'train.jsonl'}"]
    message = "has no *.safetensors. Download the weights, or set checkpoint.ref_load."
    assert message in refusal(capsys, [*elsewhere, "algorithm.kl_loss=true"])
    assert rlbatch.submit.main([*elsewhere, "algorithm.kl_loss=false"]) == 0
    assert len(started) == 1


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a machine with GPUs there are not more ranks than GPUs."""
    monkeypatch.setattr(rlbatch.prepare, "visible_gpus", lambda: 1)
    assert refusal(capsys, []).startswith(
        "layout.world_size=2: must be at most the GPUs of this machine (1), one a rank. Use layout.world_size=1"
    )


def test_help_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    """--help has every key with its default and its meaning, every group with its choices, and the run folder."""
    assert rlbatch.submit.main(["--help"]) == 0
    text = capsys.readouterr().out
    for doc in key_docs(Config):
        assert f"\n  {doc.name}=" in text
        assert doc.doc in text
    choices = ("reward               choice, code, composite, exact", "experiment           dapo, deepseek_r1, dr_grpo, embedded")
    for words in (*choices, "runs/<date>-<time>", "python -m rlbatch.plugins"):
        assert words in text
    assert f"layout.ep_size={compose([]).layout.ep_size}" in text.partition("the default, sets")[2].partition("Keys")[0]


REFUSING_PLUGIN = """
from dataclasses import dataclass

from rlbatch.api import ConfigError, Configurable, hookimpl


@dataclass(frozen=True)
class Options:
    limit: int = 1
    mode: str = "none"

    def __post_init__(self):
        if self.limit > 100:
            raise ValueError(f"limit {self.limit} is above 100")


def build(options):
    if options.mode == "config":
        raise ConfigError(f"reward.options.limit={options.limit}: must be 1. Use 1.")
    if options.mode == "value":
        raise ValueError("no such mode")
    if options.mode == "import":
        import torch_that_is_not_here
    if options.mode == "file":
        open("/there/is/none")
    return lambda samples: [0.0 for _ in samples]


@hookimpl
def rlbatch_register_rewards():
    return {"mine": Configurable(build, Options)}


@hookimpl
def rlbatch_register_offload_strategies():
    return {"mine": Configurable(build, Options)}
"""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["reward=mine", "reward.options.limit=101"], "reward.options of reward=mine: limit 101 is above 100. Correct them."),
        (["reward=mine", "reward.options.mode=config"], "reward.options.limit=1: must be 1. Use 1."),
        (["reward=mine", "reward.options.mode=value"], "reward=mine: its build raised ValueError: no such mode ("),
        (["offload=mine", "offload.options.mode=value"], "offload=mine: its build raised ValueError: no such mode ("),
        (["reward=mine", "reward.options.mode=import"], ""),
        (["offload=mine", "offload.options.mode=file"], ""),
        (["reward=mine"], ""),
    ],
)
def test_what_options_or_a_build_refuse(options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not what the machine lacks: the nodes may have it."""
    (tmp_path / "mine.py").write_text(REFUSING_PLUGIN)
    assert rlbatch.submit.main(["dry_run=true", "plugins=[mine.py]", *options]) == (2 if said else 0)
    assert said in capsys.readouterr().err
