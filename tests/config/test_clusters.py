"""Clusters, models and layouts: what `+cluster=x` alone means, and that every shipped layout fits its model."""

from __future__ import annotations

from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest

from rlbatch.api import ConfigError
from rlbatch.config.choices import choice_values
from rlbatch.config.compose import compose
from rlbatch.config.machines import ClusterConfig
from rlbatch.config.schema import LayoutConfig
from rlbatch.config.sources import group_files
from rlbatch.plan.layout import check_layout, degrees
from rlbatch.plan.nodes import place_ranks
from rlbatch.plan.parameters import ModelSize
from rlbatch.registry import load_plugins
from tests.large_models import CONFIGS

TABLES = {
    # name: tp, pp, cp, ep, etp, layers of the stages, dp, edp, offload, fraction
    "deepseek671b_96xh20": (8, 12, 1, 8, 1, (5,) * 11 + (6,), 1, 1, "cpu_adam", 1.0),
    "deepseek671b_128xh20": (8, 16, 1, 8, 1, (4,) * 15 + (1,), 1, 1, "cpu_adam", 0.5),
    "deepseek671b_256xh20": (8, 16, 1, 8, 1, (4,) * 15 + (1,), 2, 2, "optimizer_state", None),
    "deepseek671b_512xh20": (1, 16, 1, 32, 1, (4,) * 15 + (1,), 32, 1, "optimizer_state", None),
    "deepseek671b_128xh100": (8, 4, 4, 32, 1, (16,) * 3 + (13,), 1, 1, "cpu_adam", 1.0),
    "qwen3_235b_32xh20": (4, 8, 1, 4, 1, (11, *(12,) * 6, 11), 1, 1, "cpu_adam", 1.0),
    "qwen3_235b_64xh20": (4, 8, 1, 4, 1, (11, *(12,) * 6, 11), 2, 2, "cpu_adam", 0.5),
    "qwen3_235b_128xh20": (4, 8, 1, 4, 1, (11, *(12,) * 6, 11), 4, 4, "optimizer_state", None),
    "qwen3_235b_256xh20": (4, 8, 1, 4, 1, (11, *(12,) * 6, 11), 8, 8, "optimizer_state", None),
    "qwen3_30b_8xh20": (1, 1, 1, 8, 1, (48,), 8, 1, "cpu_adam", 1.0),
    "qwen3_30b_16xh20": (1, 1, 1, 8, 1, (48,), 16, 2, "cpu_adam", 1.0),
    "qwen3_30b_32xh20": (1, 1, 1, 8, 1, (48,), 32, 4, "cpu_adam", 1.0),
    "qwen3_30b_8xh100": (1, 1, 1, 8, 1, (48,), 8, 1, "cpu_adam", 1.0),
}
"""Rows of the guides' tables, and one more for a single node of H100."""
DEFAULTS = {
    "h20x8": "qwen3_30b_8xh20",
    "h20x16": "qwen3_30b_16xh20",
    "h20x32": "qwen3_235b_32xh20",
    "h20x64": "qwen3_235b_64xh20",
    "h20x96": "deepseek671b_96xh20",
    "h20x128": "deepseek671b_128xh20",
    "h20x256": "deepseek671b_256xh20",
    "h20x512": "deepseek671b_512xh20",
    "h100x8": "qwen3_30b_8xh100",
    "h100x128": "deepseek671b_128xh100",
    "template": "qwen3_30b_16xh20",
}
REGISTRY = load_plugins()
PARAMETERS = {"deepseek671b": 671_026_404_352, "qwen3_235b": 235_093_634_560, "qwen3_30b": 30_532_122_624}


def model_of(layout: str) -> str:
    return layout.rpartition("_")[0]


def test_every_layout_is_a_row() -> None:
    """The shipped layouts are those of the tables, no more and no fewer; clusters are those whose default is checked, and local."""
    assert sorted(group_files()["layout"]) == sorted(TABLES)
    assert sorted(group_files()["cluster"]) == sorted([*DEFAULTS, "local"])


@pytest.mark.parametrize("name", TABLES)
def test_layouts_fit_their_models(name: str) -> None:
    """Each row divides the real model, as the table says, on whole nodes."""
    tp, pp, cp, ep, etp, layers, dp, edp, offload, fraction = TABLES[name]
    config = compose([f"model={model_of(name)}", f"layout={name}", "model.hf=x", "data.train=x"])
    layout = config.layout
    assert (layout.tp_size, layout.pp_size, layout.cp_size, layout.ep_size, layout.etp_size) == (tp, pp, cp, ep, etp)
    family = REGISTRY.resolve_model_family(CONFIGS[model_of(name)])
    check_layout(layout, family, on_gpu=True)
    found = degrees(layout, family.num_layers)
    assert (found.dp_size, found.edp_size, found.stage_layers) == (dp, edp, layers)
    assert (config.offload.name, config.offload.options.get("fraction")) == (offload, fraction)
    assert layout.recompute_granularity == "full"
    assert layout.world_size == int(name.rpartition("_")[2].partition("x")[0])
    assert place_ranks(config, REGISTRY).ranks_per_node == 8


def test_the_guides_235b_row_is_impossible() -> None:
    """Why 11 + 6 x 12 + 11: last_stage_layers=6 leaves 88 layers for 7 stages."""
    family = REGISTRY.resolve_model_family(CONFIGS["qwen3_235b"])
    layout = LayoutConfig(world_size=32, tp_size=4, pp_size=8, ep_size=4, last_stage_layers=6)
    with pytest.raises(ConfigError, match="leaves 88 of 94 layers for 7 other stages"):
        check_layout(layout, family, on_gpu=True)


@pytest.mark.parametrize(("cluster", "layout"), DEFAULTS.items())
def test_a_cluster_alone(cluster: str, layout: str) -> None:
    """`+cluster=x` is a whole job for Slurm: its model, that model's layout for these GPUs, the math experiment."""
    config = compose([f"+cluster={cluster}"])
    by_hand = compose([f"model={config.cluster.model}", f"layout={layout}", f"+cluster={cluster}"])
    assert config == by_hand
    assert config.launcher == "slurm"
    assert config.cluster.name == cluster
    assert config.layout.world_size == config.cluster.gpus
    assert (config.model.name, config.train.precision, config.reward.name) == (model_of(layout), "bf16", "number")


def test_one_cluster_two_models() -> None:
    """The layout is looked up by model and cluster."""
    other = compose(["+cluster=h20x32", "model=qwen3_30b"])
    assert (other.model.name, other.layout.ep_size, other.layout.pp_size) == ("qwen3_30b", 8, 1)
    assert compose(["+cluster=h20x32", "model=qwen3_30b", "layout=auto"]) == other
    assert compose(["cluster=h20x32", "model=qwen3_30b"]) == other


@pytest.mark.parametrize("choices", [["+cluster=h20x96"], ["+cluster=h20x32", "model=qwen3_30b"], ["+cluster=local"], ["model=qwen3_30b"]])
def test_keys_beside_choices_change_nothing_else(choices: list[str]) -> None:
    """What choices mean is read from their files alone where the user's keys say nothing of it, else composed with them: the same."""
    assert compose([*choices, "cluster.account=''"]) == compose(choices)


def test_what_the_command_line_says_wins() -> None:
    """Keys override the files, whatever the order; the GPUs of an own cluster count for the lookup."""
    config = compose(["layout.pp_size=4", "+cluster=h20x96", "cluster.partition=rl", "experiment=hf", "model.hf=x", "data.train=y"])
    assert (config.layout.pp_size, config.cluster.partition, config.algorithm.eps_clip_high) == (4, "rl", 0.2)
    assert compose(["+cluster=template", "cluster.gpus=8"]).layout.world_size == 8


def test_another_offload_than_the_layouts() -> None:
    """The options that a layout gives its offload strategy go with it; the user's own stay."""
    assert compose(["+cluster=h20x128", "offload=optimizer_state"]).offload.options == {}
    assert compose(["+cluster=h20x128", "offload=none"]).offload.name == "none"
    config = compose(["+cluster=h20x128", "offload=cpu_adam", "offload.options.fraction=0.75"])
    assert (config.offload.name, config.offload.options) == ("cpu_adam", {"fraction": 0.75, "optimizer_state": True})


def test_another_rollout_than_the_models() -> None:
    """What a model and its layout say to their engine goes with it; the user's own stays. The same engine, named again, keeps it."""
    other = compose(["+cluster=h20x96", "rollout=transformers", "rollout.options.max_batch_size=4"]).rollout
    assert (other.name, other.options, other.engine, other.quantization) == ("transformers", {"max_batch_size": 4}, {}, "auto")
    assert compose(["+cluster=h20x96", "rollout=vllm"]) == compose(["+cluster=h20x96"])
    longer = compose(["+cluster=h20x96", "rollout.engine.max_model_len=20000"]).rollout.engine
    assert (longer["max_model_len"], longer["data_parallel_size"]) == (20000, 4)


def test_the_engine_of_64_gpus() -> None:
    """DeepSeek-R1 on 128 H100: the guide's engine, 1024 samples at once, fp8 weights, four speculative tokens."""
    rollout = compose(["+cluster=h100x128"]).rollout
    assert (rollout.name, rollout.quantization, rollout.max_response_tokens) == ("vllm", "fp8", 32768)
    assert rollout.options["gpus_per_engine"] == 64
    assert rollout.options["max_concurrency_per_replica"] * rollout.engine["data_parallel_size"] == 1024
    assert rollout.engine["enable_expert_parallel"]
    assert rollout.engine["speculative_config"] == {"method": "mtp", "num_speculative_tokens": 4}


def test_local_cluster_is_the_embedded_run() -> None:
    """`+cluster=local` changes where, not what."""
    local, plain = compose(["+cluster=local"]), compose([])
    assert replace(local, cluster=ClusterConfig()) == plain
    assert (local.cluster.gres, local.cluster.gpus_per_node, local.launcher) == ("", 2, "local")


def test_model_alone_runs_here() -> None:
    """A model without a cluster is trained on this machine, on one rank unless layout says otherwise."""
    config = compose(["model=qwen3_30b"])
    assert (config.launcher, config.layout.world_size, config.model.hf) == ("local", 1, "$MODEL_DIR")


def test_paths_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """MODEL_DIR, TRAIN_DATA and EVAL_DATA name model and data; without them the config says which variable is missing."""
    monkeypatch.setenv("MODEL_DIR", "/models/V3")
    monkeypatch.setenv("TRAIN_DATA", "/data/train.jsonl")
    monkeypatch.setenv("EVAL_DATA", "/data/eval.jsonl")
    config = compose(["+cluster=h20x96"])
    assert (config.model.hf, config.data.train, config.data.eval) == ("/models/V3", "/data/train.jsonl", "/data/eval.jsonl")
    for name in ("MODEL_DIR", "TRAIN_DATA", "EVAL_DATA"):
        monkeypatch.delenv(name)
    config = compose(["+cluster=h20x96"])
    assert (config.model.hf, config.data.train, config.data.eval) == ("$MODEL_DIR", "$TRAIN_DATA", "")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["+cluster=h20x96", "model=qwen3_30b"],
            "layout=auto: there is no layout of model.name=qwen3_30b for cluster.gpus=96 cluster.gpu=H20. Choose one of qwen3_30b_16xh20, ",
        ),
        (["layout=auto"], "layout=auto: there is no layout of model.name=(none) for cluster.gpus=0"),
        (["+cluster=h20x97"], "cluster=h20x97: unknown. Did you mean `h20x96`"),
        (["model=deepsek671b"], "model=deepsek671b: unknown. Did you mean `deepseek671b`"),
        (["layout=deepseek671b_96h20"], "layout=deepseek671b_96h20: unknown. Did you mean `deepseek671b_96xh20`"),
    ],
)
def test_what_does_not_exist(overrides: list[str], message: str) -> None:
    """Unknown names, and models without a layout for a cluster, are refused with what there is."""
    with pytest.raises(ConfigError) as caught:
        compose(overrides)
    assert str(caught.value).startswith(message)


def test_layout_by_hand() -> None:
    """Where there is no layout, the sizes on the command line are one."""
    config = compose(["+cluster=h20x96", "model=qwen3_30b", "layout.world_size=64", "layout.ep_size=8"])
    assert (config.layout.world_size, config.layout.ep_size) == (64, 8)


@pytest.mark.parametrize(("name", "exact"), PARAMETERS.items())
def test_sizes_of_the_models(name: str, exact: int) -> None:
    """What is counted from config.json is the real number, and so is `model.parameters` within 0.2 %."""
    family = REGISTRY.resolve_model_family(CONFIGS[name])
    assert ModelSize(family).total.total == exact
    assert compose([f"model={name}"]).model.parameters == pytest.approx(exact, rel=2e-3)


def test_template_names_every_key() -> None:
    """The template has every key of a cluster, so that a site sees what there is."""
    text = resources.files("rlbatch_configs").joinpath("cluster/template.yaml").read_text(encoding="utf-8")
    for name in ClusterConfig.__dataclass_fields__:
        assert f"\n  {name}:" in text, name


def test_a_model_folder_in_a_cluster_file_is_no_embedded_run(tmp_path: Path) -> None:
    """It gets what a folder on the command line gets: nothing of the embedded run."""
    (tmp_path / "mine.yaml").write_text("# @package _global_\nmodel:\n  hf: /models/mine\n")
    config = compose([f"cluster_dir={tmp_path}", "+cluster=mine", "data.train=x"])
    typed = compose(["model.hf=/models/mine", "data.train=x"])
    assert (config.optimizer, config.rollout, config.reward, config.data) == (typed.optimizer, typed.rollout, typed.reward, typed.data)


def test_only_models_are_named_and_only_clusters_described() -> None:
    """What a layout is looked up by is known before the experiment, the algorithm and the layout are chosen."""
    groups = {group: [choice_values(group, name) for name in names] for group, names in group_files().items()}
    assert [group for group, files in groups.items() if any("model.name" in values for values in files)] == ["model"]
    assert [group for group, files in groups.items() if any(key.startswith("cluster.") for values in files for key in values)] == [
        "cluster"
    ]


def test_a_cluster_of_an_unknown_model(tmp_path: Path) -> None:
    """Is told which there are."""
    (tmp_path / "mine.yaml").write_text("# @package _global_\ncluster:\n  model: qwen4\n")
    with pytest.raises(ConfigError, match=r"^cluster\.model=qwen4: unknown\. Choose deepseek671b, .*, or leave it out\."):
        compose([f"cluster_dir={tmp_path}", "+cluster=mine"])
