"""From overrides to a config: what composes, what is refused, and with which words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlbatch.api import ConfigError, DataError
from rlbatch.config.compose import compose, load_config, save_config
from rlbatch.config.overrides import PLUGIN_GROUPS
from rlbatch.config.schema import Config
from rlbatch.config.sources import group_files
from rlbatch.config.structured import NAME, key_docs

LARGE = ("math", "gsm8k", "dapo", "dr_grpo", "gspo", "reinforce_plus_plus", "deepseek_r1")
REQUIRED = {
    "experiment=hf": ["model.hf=/models/some", "data.train=train.jsonl"],
    **{f"experiment={name}": ["model.hf=/models/some"] for name in LARGE},
}
"""What the user must add to a choice."""


def shipped_choices() -> list[str]:
    return [f"{group}={name}" for group, names in group_files().items() for name in names]


@pytest.mark.parametrize("choice", shipped_choices())
def test_shipped_configs_compose(choice: str) -> None:
    """Every yaml file in configs/ composes to a config that passes the checks."""
    compose([choice, *REQUIRED.get(choice, [])])


def test_default_is_embedded_run() -> None:
    """Without overrides: two ranks that share the experts, everything embedded."""
    config = compose([])
    assert (config.layout.world_size, config.layout.ep_size) == (2, 2)
    assert {config.model.hf, config.data.train, config.data.eval} == {"embedded"}


@pytest.mark.parametrize("group", PLUGIN_GROUPS)
def test_names_agree(group: str, repository: Path) -> None:
    """`rollout=x` is configs/rollout/x.yaml, plugins/rollout_x.py and tests/plugins/test_rollout_x.py; likewise the other groups."""
    choices = group_files()[group]
    assert choices
    for name in choices:
        assert f"name: {name}\n" in (repository / f"configs/{group}/{name}.yaml").read_text()
        assert (repository / f"plugins/{group}_{name}.py").is_file()
        assert (repository / f"tests/plugins/test_{group}_{name}.py").is_file()


def test_overrides_reach_the_config() -> None:
    """Values arrive with the type of their key; an integer is a number, `+` makes no difference, empty and null are values."""
    config = compose(
        [
            "train.steps=7",
            "+seed=3",
            "optimizer.lr=1",
            "data.eval=",
            "layout.first_stage_layers=null",
            "plugins=[a/b.py,c.d]",
            "reward.options.x=1",
        ]
    )
    assert (config.train.steps, config.seed, config.optimizer.lr, config.data.eval) == (7, 3, 1.0, "")
    assert isinstance(config.optimizer.lr, float)
    assert config.layout.first_stage_layers is None
    assert config.plugins == (f"{Path.cwd()}/a/b.py", "c.d")
    assert config.reward.options == {"x": 1}


def test_plugin_without_yaml() -> None:
    """A plugin name needs no yaml file; whether it exists is the registry's business."""
    assert compose(["reward=somebody_elses"]).reward.name == "somebody_elses"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("layout.tp=2", "layout.tp: unknown key. Did you mean `layout.tp_size`?"),
        ("max_tokens=9", "max_tokens: unknown key. Did you mean `train.max_tokens_per_gpu`"),
        ("trian.steps=5", "trian.steps: unknown key. Did you mean `train.steps`"),
        ("steps=5", "steps: unknown key. Did you mean `train.steps`?"),
        ("rewrd=sequence", "rewrd: unknown key. Did you mean `reward`"),
        ("hydra.run.dir=x", "hydra.run.dir: unknown key."),
        ("train.zzz=1", "train.zzz: unknown key. Known: train.steps, "),
        ("train=5", "train=5: `train` is a group of keys. Set one of train.steps, "),
        ("experiment=embeded", "experiment=embeded: unknown. Did you mean `embedded`? Known: dapo, deepseek_r1, dr_grpo, embedded"),
        ("experiment=null", "experiment=null: unknown. Known: dapo, deepseek_r1, dr_grpo, embedded"),
        ("reward={name: x}", "reward={name: x}: must be one name. Choose "),
        ("rollout@x=transformers", "unknown key|is a group of keys"),
        ("train.steps=2.5", "train.steps=2.5: must be an integer, not a number."),
        ("train.steps=many", "train.steps=many: must be an integer, not `many`."),
        ("seed=true", "seed=true: must be an integer, not true or false."),
        ("optimizer.lr=high", "optimizer.lr=high: must be a number, not `high`."),
        ("optimizer.lr=inf", "optimizer.lr=inf: must be a finite number."),
        ("algorithm.kl_loss=1", "algorithm.kl_loss=1: must be true or false, not an integer."),
        ("train.precision=fp16", "train.precision=fp16: must be `fp32` or `bf16`, not `fp16`."),
        ("algorithm.kl_kind=k4", "must be `k1`, `abs`, `k2`, `k3` or `low_var_kl`, not `k4`."),
        ("layout.recompute_granularity=some", "must be `full` or `selective` or null, not `some`."),
        ("layout.first_stage_layers=1.5", "must be an integer or null, not a number."),
        ("train.steps=null", "train.steps=null: must be an integer, not null."),
        ("run_dir=null", "run_dir=null: must be text, not null."),
        ("run_dir=[a]", "run_dir=[a]: must be text, not a list. Quote it: 'run_dir=\"[a]\"'."),
        ("plugins=a.py", "plugins=a.py: must be a list, not `a.py`."),
        ("run_dir=a\0b", r"run_dir='a\x00b': must be text in UTF-8, without NUL."),
        ("run_dir=\udcff", r"run_dir='\udcff': must be text in UTF-8"),
        ("plugins=['\udcff.py']", r"plugins[0]='\udcff.py': must be text in UTF-8"),
        ("plugins=[[1]]", "plugins[0]=[1]: must be text, not a list."),
        ("seed=" + 5000 * "9", "not of the form key=value"),
        ("reward.options=3", "reward.options=3: must be a mapping, not an integer."),
        ("train.steps=1,2", "train.steps=1,2: has several values. Give one; a list is written [a,b]."),
        ("~train.steps", "~train.steps: keys cannot be removed."),
        ("data.train_batch_size=256", "data.train_batch_size=256: is verl's, not a key of rlbatch. Use train.prompts_per_step."),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=64", "Use train.updates_per_step. Prompts a step over"),
        ("ppo_mini_batch_size=64", "is verl's, not a key of rlbatch. Use train.updates_per_step."),
        ("+trainer.logger=['console','wandb']", "is verl's, not a key of rlbatch. Use trackers. trackers=[tensorboard,wandb]; samples"),
        ("--rollout-batch-size=32", "is slime or vime's, not a key of rlbatch. Use train.prompts_per_step."),
        ("--rollout-batch-size", "is slime or vime's, not a key of rlbatch. Use train.prompts_per_step."),
        ("grpo.max_num_steps=3", "is NeMo-RL's, not a key of rlbatch. Use train.steps."),
        ("hydra.searchpath=[x]", "Use cluster_dir=<folder>"),
        ("foo.bar=1", "foo.bar: unknown key. Known: seed, run_dir, "),
        (
            "train.steps",
            "`train.steps`: not of the form key=value. Write train.steps=<value>.",
        ),
        ("--steps=3", "`--steps=3`: not of the form key=value. Keys have no dashes before them; --help lists them."),
        ("--dry-run", "`--dry-run`: not of the form key=value. Write dry_run=<value>."),
        ("my_reward.py", "`my_reward.py`: not of the form key=value. Python files are given as plugins=[my_reward.py]."),
        ("data.train=${oops}", "oops"),
        ("experiment=hf", "model.hf: has no value. Give one: model.hf=<text>."),
    ],
)
def test_refused_overrides(override: str, message: str) -> None:
    """An override that does not fit is refused by its key, with the closest names or the allowed values."""
    with pytest.raises(ConfigError) as caught:
        compose([override])
    assert message in str(caught.value) or re.search(message, str(caught.value))


def test_a_whole_script_of_another_program_is_answered_at_once() -> None:
    """Not a key a try."""
    with pytest.raises(ConfigError) as caught:
        compose(["data.train_batch_size=8", "seed=3", "trainer.nnodes=2", "--num-rollout", "5"])
    told = [line.partition(":")[0] for line in str(caught.value).splitlines()]
    assert told == ["data.train_batch_size=8", "trainer.nnodes=2", "--num-rollout"]


def test_composition_is_repeatable() -> None:
    """A composition leaves nothing behind for the next one in the same process."""
    before = compose([])
    compose(["reward=somebody_elses", "seed=9"])
    assert compose([]) == before


def test_saved_config_reads_back_equal(tmp_path: Path) -> None:
    """config.yaml holds every key, one a line, and reads back as the same config."""
    config = compose(["plugins=[a.py]", "reward.options.x=[1,2]", "optimizer.lr=1e-7", "run_dir='with: colon'"])
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config
    text = (tmp_path / "config.yaml").read_text()
    assert all(re.search(rf"^ *{doc.name.rpartition('.')[2]}:", text, re.MULTILINE) for doc in key_docs(Config) if NAME not in doc.name)


def test_edited_config_is_checked(tmp_path: Path) -> None:
    """A run folder's config.yaml that was edited by hand is checked like overrides."""
    path = tmp_path / "config.yaml"
    path.write_text("train:\n  stepps: 5\n")
    with pytest.raises(ConfigError, match=r"train\.stepps: unknown key\. Did you mean `train\.steps`\?"):
        load_config(path)
    path.write_text("- 1\n")
    with pytest.raises(ConfigError, match="must be a mapping"):
        load_config(path)
    path.write_text("train: [\n")
    with pytest.raises(ConfigError, match=re.escape(str(path))):
        load_config(path)
    with pytest.raises(DataError, match=r"absent\.yaml: cannot be read"):
        load_config(tmp_path / "absent.yaml")


def test_every_key_is_documented() -> None:
    """Each key of the schema says what it means."""
    assert not [doc.name for doc in key_docs(Config) if not doc.doc]
