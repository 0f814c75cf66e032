"""docs/use/migrating*.md against the schema and against the settings of the documents that people come from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlbatch.api import Prompt, Sample
from rlbatch.config.compose import compose
from rlbatch.config.foreign_keys import PROGRAMS, answer
from rlbatch.config.schema import Config
from rlbatch.config.structured import key_docs
from rlbatch.convert.arguments import MODES, Options
from rlbatch.metrics.names import TAGS
from rlbatch.registry import load_plugins

VERL = "NNODES TP PP EP OFFLOAD_FRACTION OFFLOAD_OPTIM LAST_LAYER MEGATRON_MAX_FRAGMENT_MB".split()
VERL_RESULTS = ["num gpus", "mean response length", "rollout time(s)", "GPU memory(GB)", "CPU memory(GB)", "mfu", "MFU", "step time(s)"]
VIME = """
    --hf-checkpoint --ref-load --load --save --save-interval
    --tensor-model-parallel-size --sequence-parallel --pipeline-model-parallel-size --context-parallel-size
    --expert-model-parallel-size --expert-tensor-parallel-size
    --decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers
    --recompute-granularity --recompute-method --recompute-num-layers
    --use-dynamic-batch-size --max-tokens-per-gpu micro_batch_size
    --advantage-estimator --use-kl-loss --kl-loss-coef --kl-loss-type --kl-coef --entropy-coef --eps-clip --eps-clip-high
    --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer
    --rollout-num-gpus-per-engine --vllm-gpu-memory-utilization --vllm-enable-expert-parallel --vllm-data-parallel-size
    --vllm-server-concurrency --vllm-speculative-config
    --moe-enable-deepep --moe-token-dispatcher-type
    --input-fp8-hf-path --output-bf16-hf-path tools/fp8_cast_bf16.py tools/convert_hf_to_torch_dist.py
    --nproc-per-node --nnodes --node-rank --master-addr --master-port --local-dir
    --address --num-gpus --node-ip-address --disable-usage-stats --head --force
    MODEL_ARGS MASTER_ADDR NODE_RANK WORKER_IP BASE_DIR PYTHONPATH mpi_hostfile
""".split()

SETTING = re.compile(r"(?<![\w-])(?:--)?[A-Za-z][\w/.-]*")


@pytest.fixture(scope="module")
def page(repository: Path) -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted((repository / "docs/use").glob("migrating*.md")))


def rows(page: str) -> list[tuple[str, str, str]]:
    """Cells of every table row, without the header and the rule."""
    cells = [tuple(cell.strip() for cell in line.strip("|\n").split("|")) for line in page.splitlines() if line.startswith("| ")]
    return [(a, b, c) for a, b, c in cells if b not in ("rlbatch", "--")]


def tags(page: str) -> set[str]:
    """Whatever looks like a tag of one of our groups."""
    groups = "|".join({tag.partition("/")[0] for tag in TAGS})
    return set(re.findall(rf"`((?:{groups})/[a-z_/]+)`", page))


def keys() -> set[str]:
    return {doc.name for doc in key_docs(Config)}


ENGINE = (
    "`rollout.engine.",
    "`algorithm.loss_options.dual_clip",
    "`algorithm.advantage_options.gamma",
    *(f"`rollout.options.{name}" for name in ("gpus_per_engine", "max_concurrency_per_replica", "separate_gpus")),
)
"""vLLM's own options, and three of its plugin."""


def test_every_row_answers_with_a_key_or_says_why_not(page: str) -> None:
    """The second column is a key of the schema or of conversions, a metric's tag, `none` or `not yet`; `none` comes with a reason."""
    conversions = {f"mode={mode}" for mode in MODES} | {doc.name for doc in key_docs(Options)}
    known = keys() | set(TAGS) | conversions
    for theirs, ours, why in rows(page):
        assert ours in ("none", "not yet") or ours.strip("`") in known or ours.startswith(ENGINE), theirs
        assert why or ours != "none", theirs


def test_every_key_on_the_page_exists(page: str) -> None:
    """Also in the text: whatever looks like a key of one of our sections is one."""
    sections = {name.partition(".")[0] for name in keys() if "." in name}
    named = set(re.findall(rf"(?<![\w./-])(?:{'|'.join(sorted(sections))})\.[a-z_0-9]+(?:\.[a-z_0-9]+)*", page))
    assert "layout.tp_size" in named
    plugins = {name for name in named if f"`{name}".startswith(ENGINE)}
    theirs = {key for table in PROGRAMS.values() for key in table} | {"data.train_files", "data.val_files"}
    assert {name for name in named if not name.endswith((".md", ".json"))} - plugins - theirs <= keys()


def test_every_tag_on_the_page_exists(page: str) -> None:
    """Whatever looks like a metric's tag is one."""
    assert "time/step_s" in tags(page)
    assert tags(page) <= set(TAGS)


@pytest.mark.parametrize("setting", [*VERL, *VIME])
def test_every_setting_is_answered(page: str, setting: str) -> None:
    """Each flag, variable and script has a row of its own (or shares one), matched as a whole word."""
    answered = {word for theirs, _, _ in rows(page) for word in SETTING.findall(theirs.replace("`", " "))}
    assert setting in answered


@pytest.mark.parametrize("column", VERL_RESULTS)
def test_every_result_column_is_named(page: str, column: str) -> None:
    """The columns of verl's benchmark are on the page."""
    assert f"`{column}`" in page


def test_our_own_keys_are_ours() -> None:
    """Also where another program has a key that ends so."""
    config = compose(["rollout.temperature=0.5", "train.steps=3"])
    assert (config.rollout.temperature, config.train.steps) == (0.5, 3)
    assert answer("rollout.n").startswith("is verl's, not a key of rlbatch. Use algorithm.group_size.")
    assert not answer("trainers.x") and not answer("n") and not answer("path")


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("total_epochs", "is verl's, not a key of rlbatch. Use train.steps."),
        ("rollout_batch_size", "is slime or vime's, not a key of rlbatch. Use train.prompts_per_step."),
        ("--rollout_batch_size", "is OpenRLHF's, not a key of rlbatch. Use train.prompts_per_step."),
        ("--num_rollout", "is slime or vime's, not a key of rlbatch. Use train.steps."),
        (
            "actor_rollout_ref.actor.fsdp_config.fsdp_size",
            "is verl's, not a key of rlbatch, and docs/use/migrating.md has none for it. Leave it out;",
        ),
        ("policy.dtensor_cfg.enabled", "is NeMo-RL's, not a key of rlbatch, and docs/use/migrating.md has none for it."),
    ],
)
def test_by_habit(typed: str, said: str) -> None:
    """Also without a section or dashes, and of keys that nothing here corresponds to."""
    assert answer(typed).startswith(said)


def test_verls_reward(page: str, tmp_path: Path) -> None:
    """The wrapped ``compute_score`` of the page scores rows of verl's."""
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my_reward.py").write_text(block)
    reward = load_plugins([str(tmp_path / "my_reward.py")]).build_reward("mine", {})
    samples = [
        Sample(Prompt(0, "2 + 2?", (1,), "4", metadata=row), 0, [1, 2], [0, 1], [0, 0], answer, "stop")  # type: ignore[arg-type]
        for row, answer in (({"data_source": "gsm8k", "extra_info": {"index": 0}}, " 4"), ({}, "5"))
    ]
    assert reward(samples) == [1.0, 0.0]


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_page_has_what_submit_answers(page: str, program: str) -> None:
    """A key that is typed by habit is answered with ours, which exists, and the page says the same."""
    said = {theirs.strip("`"): ours.strip("`") for theirs, ours, _ in rows(page)}
    for theirs, ours in PROGRAMS[program].items():
        assert ours.key == "none" or ours.key in keys() or f"`{ours.key}".startswith(ENGINE), theirs
        assert ours.key != "none" or ours.note, theirs
        assert said[theirs].partition("=")[0] == ours.key, theirs
        assert answer(theirs).startswith(f"is {program}'s, not a key of rlbatch. "), theirs
