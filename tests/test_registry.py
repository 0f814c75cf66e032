"""Discovery of plugins: who is found, in which order, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

import rlbatch.registry
from rlbatch.api import (
    API_VERSION,
    ConfigError,
    ModelError,
    ModelFamily,
    PluginError,
    RolloutContext,
)
from rlbatch.config.compose import load_config, save_config
from rlbatch.launch.records.failures import StoppedBySignal
from rlbatch.plan.nodes import place_ranks
from rlbatch.registry import compose_job, load_plugins
from tests.megatron.real_models import CONFIGS

HEADER = "from dataclasses import dataclass, field\n\nfrom rlbatch.api import *\n"
REWARD = """
    @hookimpl
    def rlbatch_register_rewards():
        return {"%s": lambda samples: [1.0 for _ in samples]}
"""
WITH_OPTIONS = """
    from __future__ import annotations
    from rlbatch.api import Configurable, hookimpl
    from dataclasses import dataclass, field

    @dataclass(frozen=True)
    class Options:
        limit: int = field(default=20, metadata={"doc": "Tokens that cost nothing."})
        kind: str = "a"

    @hookimpl
    def rlbatch_register_rewards():
        return {"short": Configurable(lambda options: lambda samples: [options.limit for _ in samples], Options)}

    @hookimpl
    def rlbatch_register_rollout_backends():
        return {"engine": Configurable(lambda context, options: (context, options), Options)}

    @hookimpl
    def rlbatch_register_offload_strategies():
        return {"mover": Configurable(lambda options: options, Options)}

    @hookimpl
    def rlbatch_register_policy_losses():
        return {"my_loss": Configurable(lambda options: lambda inputs: options, Options)}

    @hookimpl
    def rlbatch_register_advantage_estimators():
        return {"mine": Configurable(lambda options: lambda inputs: options, Options)}
"""

Write = Callable[..., str]


@pytest.fixture
def plugin(tmp_path: Path) -> Write:
    """Writes a plugin file and returns its path."""

    def write(body: str, name: str = "my_plugin") -> str:
        path = tmp_path / f"{name}.py"
        path.write_text((HEADER if "__future__" not in body else "") + dedent(body))
        return str(path)

    return write


def refusal(*extra: str) -> str:
    with pytest.raises(PluginError) as caught:
        load_plugins(extra)
    return str(caught.value)


def test_built_ins_are_found() -> None:
    """The names that the default config uses are registered, each by its module in plugins/."""
    registry = load_plugins()
    config = rlbatch.registry.Config()
    for table, name in (
        (registry.rollouts, config.rollout.name),
        (registry.rewards, config.reward.name),
        (registry.offloads, config.offload.name),
        (registry.advantages, config.algorithm.advantage),
        (registry.losses, config.algorithm.loss),
    ):
        assert table[name].supplier.distribution == "rlbatch"
        assert table[name].supplier.module.startswith("rlbatch_plugins.")


def test_file_and_module_plugins(plugin: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`plugins=[...]` takes python files and importable modules; naming one twice changes nothing."""
    path = plugin(REWARD % "from_file")
    plugin(REWARD % "from_module", name="some_reward_module")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry = load_plugins([path, "some_reward_module", "some_reward_module"])
    assert registry.rewards["from_file"].supplier.module == path
    assert registry.rewards["from_module"].supplier.module == "some_reward_module"
    assert registry.build_reward("from_file", {})([object(), object()]) == [1.0, 1.0]  # type: ignore[list-item]


def test_unknown_name_lists_what_exists() -> None:
    """An unknown name is refused with the closest ones and everything that exists, each with its supplier."""
    with pytest.raises(PluginError) as caught:
        compose_job(["reward=squence"])
    message = str(caught.value)
    assert message.startswith("reward=squence: unknown. Did you mean `sequence` (rlbatch_plugins.reward_sequence)? Known: ")
    with pytest.raises(PluginError, match=r"^algorithm\.advantage=gpro: unknown\. Did you mean `grpo` \(rlbatch_plugins\.advantage_grpo\)"):
        compose_job(["algorithm.advantage=gpro"])
    with pytest.raises(PluginError, match=r"^algorithm\.loss=zzz: unknown\. Known: `cispo` .*, `clip` \(rlbatch_plugins\.loss_clip\)"):
        compose_job(["algorithm.loss=zzz"])
    with pytest.raises(PluginError, match=r"^rollout=vlm: unknown\. Did you mean `vllm` \(rlbatch_plugins\.rollout_vllm\)"):
        compose_job(["rollout=vlm"])
    with pytest.raises(PluginError, match=r"^offload=nine: unknown\."):
        compose_job(["offload=nine"])


def test_two_plugins_with_one_name(plugin: Write) -> None:
    """Two plugins that offer one name are an error that names both."""
    path = plugin(REWARD % "sequence")
    message = refusal(path)
    assert message.startswith("reward=sequence: registered twice, by rlbatch_plugins.reward_sequence and ")
    assert path in message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("import module_that_is_not_there", "does not import: ModuleNotFoundError: No module named 'module_that_is_not_there'"),
        ("this is no python", "does not import: SyntaxError"),
        ("1 / 0", "does not import: ZeroDivisionError"),
        ("x = 1", "implements no hook. Put `@rlbatch.api.hookimpl` above one of rlbatch_register_"),
        ("def rlbatch_register_rewards():\n    return {}", "implements no hook."),
        (
            "@hookimpl\ndef rlbatch_register_reward():\n    return {}",
            "`rlbatch_register_reward` is not a hook. Did you mean `rlbatch_register_rewards`?",
        ),
        ("@hookimpl\ndef rlbatch_resolve_model_family(config):\n    return None", "rlbatch_resolve_model_family"),
        (
            "@hookimpl\ndef rlbatch_register_rewards():\n    return [1]",
            "rlbatch_register_rewards must return a mapping from names, returned list.",
        ),
        ("@hookimpl\ndef rlbatch_register_rewards():\n    return {1: print}", "must return a mapping from names"),
        ("@hookimpl\ndef rlbatch_register_rewards():\n    return {'': print}", "must return a mapping from names"),
        (
            "@dataclass\nclass Options:\n    a: 'Nope' = 1\n\n@hookimpl\ndef rlbatch_register_rewards():\n"
            "    return {'x': Configurable(lambda options: print, Options)}",
            "the types of its options cannot be read (NameError: name 'Nope' is not defined).",
        ),
        ("@hookimpl\ndef rlbatch_register_rewards():\n    return {'x': 5}", "`x` of rlbatch_register_rewards must be callable, is int."),
        (
            "def mine(source, text: str, *, truth=None):\n    pass\n\n@hookimpl\ndef rlbatch_register_rewards():\n    return {'x': mine}",
            "`x` of rlbatch_register_rewards must take (samples), takes (source, text, *, truth=None). Correct it;",
        ),
        (
            "async def mine(inputs): pass\n\n@hookimpl\ndef rlbatch_register_policy_losses():\n    return {'x': mine}",
            "must not be an `async def`",
        ),
        (
            "@hookimpl\ndef rlbatch_register_policy_losses():\n    return {'x': lambda logprobs, advantages: 0}",
            "`x` of rlbatch_register_policy_losses must take (inputs), takes (logprobs, advantages).",
        ),
        ("class Mine: pass\n\n@hookimpl\ndef rlbatch_register_rewards():\n    return {'x': Mine}", "must take (samples), takes ()."),
        (
            "@dataclass\nclass Options:\n    a: int = 1\n\n@hookimpl\ndef rlbatch_register_rewards():\n"
            "    return {'x': Configurable(lambda: print, Options)}",
            "its build must take (options), takes ().",
        ),
        (
            "@hookimpl\ndef rlbatch_register_rewards():\n    return 1 / 0",
            "rlbatch_register_rewards raised ZeroDivisionError: division by zero",
        ),
        (
            f"RLBATCH_API = {API_VERSION + 1}\n" + dedent(REWARD % "x"),
            f"needs plugin API {API_VERSION + 1}, this rlbatch has {API_VERSION}.",
        ),
        ("@hookimpl\ndef rlbatch_register_rewards():\n    return {'x': Configurable(print, int)}", "options must be a dataclass."),
        (
            "@dataclass\nclass Options:\n    a: int\n\n@hookimpl\ndef rlbatch_register_rewards():\n"
            "    return {'x': Configurable(print, Options)}",
            "the option `a` has no default.",
        ),
        (
            "@dataclass\nclass Options:\n    a: int = 1\n\n@hookimpl\ndef rlbatch_register_policy_losses():\n"
            "    return {'x': Configurable(lambda: 0, Options)}",
            "its build must take (options), takes ().",
        ),
        (
            "@hookimpl\ndef rlbatch_register_advantage_estimators():\n    return {'x': AdvantageSpec(lambda options, more: 0)}",
            "its build must take (options), takes (options, more).",
        ),
        (
            "@hookimpl\ndef rlbatch_register_policy_losses():\n    return {'x': AdvantageSpec(lambda options: 0)}",
            "`x` of rlbatch_register_policy_losses is an AdvantageSpec. Register a function or a LossSpec.",
        ),
        (
            "@hookimpl\ndef rlbatch_register_policy_losses():\n    return {'x': LossSpec(lambda options: 0, aggregations='sequence_mean')}",
            "aggregations='sequence_mean': must be a tuple of token_mean, sequence_mean, sequence_sum, sequence_sum_norm.",
        ),
        (
            "@hookimpl\ndef rlbatch_register_offload_strategies():\n    return {'x': RewardSpec(lambda options: 0, NoOptions)}",
            "`x` of rlbatch_register_offload_strategies is a RewardSpec. Register a function or an OffloadSpec.",
        ),
        (
            "@hookimpl\ndef rlbatch_register_rollout_backends():\n"
            "    return {'x': RolloutSpec(lambda context, options: 0, NoOptions, ranks_option='gpus')}",
            "ranks_option=gpus is none of its options.",
        ),
    ],
)
def test_broken_plugins(plugin: Write, body: str, message: str) -> None:
    """A plugin that does not import or does not fit the API stops the job, named, with the cause."""
    path = plugin(body)
    refused = refusal(path)
    assert refused.startswith(f"plugin {path}: ")
    assert message in refused


@pytest.mark.parametrize("body", ["{}", "@hookimpl\ndef rlbatch_register_rewards():\n    {}"])
def test_signal_while_a_plugin_is_imported(plugin: Write, body: str) -> None:
    """A job that is preempted in its start is stopped, not failed by the plugin; sys.exit in a plugin is its fault."""
    with pytest.raises(StoppedBySignal):
        load_plugins([plugin(body.format("from rlbatch.launch.records.failures import StoppedBySignal; raise StoppedBySignal(140)"))])
    assert "SystemExit: 3" in refusal(plugin(body.format("raise SystemExit(3)")))


def test_missing_files_and_modules() -> None:
    """A path or module that does not exist is named as it was written."""
    assert refusal("no/such_file.py").startswith("plugins=[no/such_file.py]: there is no such file (/")
    cause = "ModuleNotFoundError: No module named 'no_such_module_here'"
    assert refusal("no_such_module_here") == f"plugin no_such_module_here: does not import: {cause}. Correct it, or do without it."


def test_accepted_api_version(plugin: Write) -> None:
    """A plugin may require the API version that there is."""
    assert "x" in load_plugins([plugin(f"RLBATCH_API = {API_VERSION}\n" + dedent(REWARD % "x"))]).rewards


def test_broken_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed plugin that does not import stops the job as well, naming its entry point."""
    found = list(rlbatch.registry.metadata.entry_points(group="rlbatch"))
    found.append(EntryPoint("broken", "module_that_is_not_there", "rlbatch"))
    monkeypatch.setattr(rlbatch.registry.metadata, "entry_points", lambda group: found)
    assert refusal().startswith("plugin module_that_is_not_there: does not import: ModuleNotFoundError")


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """From source, without the entry points of an installation, the error says what to do."""
    monkeypatch.setattr(rlbatch.registry.metadata, "entry_points", lambda group: [])
    assert "entry points of rlbatch are not installed" in refusal()
    assert "pip install -e ." in refusal()


def test_model_family(plugin: Write) -> None:
    """A built-in family claims its model type; a third party is asked first; an unclaimed type is refused by name."""
    qwen: dict[str, Any] = {"model_type": "qwen3_moe"}
    body = """
        @hookimpl
        def rlbatch_resolve_model_family(hf_config):
            if hf_config["model_type"] in ("qwen3_moe", "mine"):
                return ModelFamily("mine", {"num_layers": 1}, 10, 1e4, False, 8, ())
            return 5 if hf_config["model_type"] == "odd" else None
    """
    registry = load_plugins([plugin(body)])
    assert isinstance(registry.resolve_model_family(qwen), ModelFamily)
    assert registry.resolve_model_family(qwen).name == "mine"
    assert registry.model_families[0].module.endswith("my_plugin.py")
    modules = [family.module for family in registry.model_families]
    built_in = [module.removeprefix("rlbatch_plugins.model_") for module in modules if "rlbatch_plugins" in module]
    assert sorted(built_in) == ["deepseek_v3", "mixtral", "qwen2", "qwen3", "qwen3_moe"]
    with pytest.raises(
        ModelError,
        match=r"^model\.hf: no plugin claims model_type `gpt9`\. Asked: .*my_plugin\.py, .*rlbatch_plugins\.model_qwen3_moe.* add yours",
    ):
        registry.resolve_model_family({"model_type": "gpt9"})
    other_name = r"`kimi_k2`\. Its architecture is DeepseekV3ForCausalLM: with model_type `deepseek_v3` in its config\.json it is taken"
    with pytest.raises(ModelError, match=other_name):
        registry.resolve_model_family({**CONFIGS["DeepSeek-V3"], "model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]})
    with pytest.raises(PluginError, match="must return a ModelFamily or None, returned int"):
        registry.resolve_model_family({"model_type": "odd"})


def test_options_become_config_keys(plugin: Write) -> None:
    """Options appear in the config with their defaults, overridden by `reward.options.*`, and reach the factory as the dataclass."""
    path = plugin(WITH_OPTIONS)
    config, registry = compose_job([f"plugins=['{path}']", "reward=short", "reward.options.limit=3", "rollout=engine", "offload=mover"])
    assert config.reward.options == {"limit": 3, "kind": "a"}
    assert config.rollout.options == {"limit": 20, "kind": "a"}
    assert registry.build_reward("short", config.reward.options)([object()]) == [3]  # type: ignore[list-item]
    context = RolloutContext(Path("model"), "cpu", "float32")
    built: Any = registry.build_rollout("engine", config.rollout.options, context)
    assert built[0] is context
    assert built[1].limit == 20
    moved: Any = registry.build_offload("mover", {"kind": "b"})
    assert moved.kind == "b"


def test_options_of_the_algorithm_become_config_keys(plugin: Write, tmp_path: Path) -> None:
    """As those of a reward: defaults in the config, overridden by `algorithm.loss_options.*`, texts as they were typed."""
    chosen = [
        "algorithm.loss=my_loss",
        "algorithm.advantage=mine",
        "algorithm.loss_options.limit=3",
        "algorithm.advantage_options.kind=007",
    ]
    config, registry = compose_job([f"plugins=['{plugin(WITH_OPTIONS)}']", *chosen])
    save_config(config, tmp_path / "config.yaml")
    algorithm = load_config(tmp_path / "config.yaml").algorithm
    assert (algorithm.loss_options, algorithm.advantage_options) == ({"limit": 3, "kind": "a"}, {"limit": 20, "kind": "007"})
    loss, estimator = registry.build_loss(algorithm), registry.build_advantage(algorithm)
    assert loss(None).limit == 3  # type: ignore[arg-type, attr-defined]
    assert estimator(None).kind == "007"  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["007", "1e5", "true", "off", "0.10", "2026-01-01", "a,b", "a=b", "{x}: y", "[x]=y", "é  ½", "(a"])
def test_options_that_are_text_take_what_was_typed(plugin: Write, text: str, tmp_path: Path) -> None:
    """The command line makes no number, list or truth value of it, and it comes back from the run folder's config as it was."""
    config, registry = compose_job([f"plugins=['{plugin(WITH_OPTIONS)}']", "reward=short", f"reward.options.kind={text}"])
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml").reward.options["kind"] == text
    assert registry.rewards["short"].parse(config.reward.options, "reward").kind == text


def test_options_that_map_to_text_take_what_was_typed(plugin: Write) -> None:
    """One key, or several at once."""
    path = plugin(WITH_OPTIONS.replace('kind: str = "a"', "words: dict[str, str] = field(default_factory=dict)"))
    typed = ["reward.options.words={a: 007, b: 1e5}", "reward.options.words.c=1e5", "+reward.options.words.d=a,b"]
    config, _ = compose_job([f"plugins=['{path}']", "reward=short", *typed])
    assert config.reward.options["words"] == {"a": "007", "b": "1e5", "c": "1e5", "d": "a,b"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("reward.options.limit=1,2", "reward.options.limit=1,2: must be an integer, not `1,2`. Use one number, e.g. 1."),
        ("reward.options.limt=3", "reward.options.limt: unknown key. Did you mean `reward.options.limit`?"),
        ("reward.options.limit=x", "reward.options.limit=x: must be an integer, not `x`. Use e.g. 20."),
        ("offload.options.limit=3", "offload.options.limit: unknown key. Known: none; --help lists all."),
        (
            "algorithm.loss_options.dual_clp=3",
            "algorithm.loss_options.dual_clp: unknown key. Did you mean `algorithm.loss_options.dual_clip`?",
        ),
        ("algorithm.loss_options.dual_clip=1", "algorithm.loss_options.dual_clip=1.0: must be greater than 1. Use e.g. 2."),
        (
            "algorithm.loss_options.dual_clip=0.5_5.0",
            "algorithm.loss_options.dual_clip=0.5_5.0: must be one number, without `_`. Use algorithm.loss_options.dual_clip=5.0.",
        ),
        (
            "algorithm.eps_clip=0.5_5.0",
            "algorithm.eps_clip=0.5_5.0: must be one number, without `_`. Use algorithm.eps_clip=0.5 algorithm.eps_clip_high=5.0.",
        ),
        ("algorithm.eps_clip=[0.2,0.28]", "algorithm.eps_clip=[0.2,0.28]: must be a number, not a list. Use e.g. 0.2."),
        ("algorithm.advantage_options.std=step", "algorithm.advantage_options.std=step: must be `group` or `batch`, not `step`."),
        ("algorithm.advantage_options.eps=-1", "algorithm.advantage_options.eps=-1.0: must be 0 or more. Use e.g. 1e-06."),
    ],
)
def test_refused_options(plugin: Write, override: str, message: str) -> None:
    """Options are as strict as other keys, also for a plugin that has none."""
    with pytest.raises(ConfigError) as caught:
        compose_job([f"plugins=['{plugin(WITH_OPTIONS)}']", "reward=short", override])
    assert str(caught.value) == message


def test_failed_file_leaves_no_module(plugin: Write) -> None:
    """A plugin file that failed can be corrected and loaded again in the same process."""
    path = plugin("1 / 0")
    refusal(path)
    assert "rlbatch_plugin_file_my_plugin" not in sys.modules
    plugin(REWARD % "repaired")
    assert "repaired" in load_plugins([path]).rewards


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.engine.max_num_seqs=4"], "rollout.engine.max_num_seqs: rollout=transformers has no engine with options of its own. "),
        (
            ["rollout=vllm", "rollout.options.gpus_per_engine=3"],
            "rollout.options.gpus_per_engine=3: must be at least 1 and divide layout.world_size=2. "
            "Give it 3 ranks or more: layout.world_size=3, or ",
        ),
        *(
            (
                [f"algorithm.loss={name}", f"algorithm.loss_aggregation={aggregation}"],
                f"algorithm.loss_aggregation={aggregation}: algorithm.loss={name} has one value for a whole response, so only "
                "sequence_mean is what it is defined by. Use algorithm.loss_aggregation=sequence_mean.",
            )
            for name, aggregation in (("gspo", "token_mean"), ("gspo_token", "sequence_sum"), ("gmpo", "sequence_sum_norm"))
        ),
        (
            ["algorithm.loss=sapo", "algorithm.loss_options.tau_neg=0"],
            "algorithm.loss_options.tau_neg=0.0: must be 0.001 or more. Use e.g. 1.05.",
        ),
        (
            ["rollout=vllm", "rollout.top_p=0.9"],
            "rollout.top_p=0.9: rollout=vllm does not say which tokens each one was chosen from, and the trainer's log-probs must be "
            "of the same. Use rollout.top_p=1 rollout.top_k=0, or rollout=transformers.",
        ),
        (["rollout=sglang", "rollout.top_k=20"], "rollout.top_k=20: rollout=sglang does not say which tokens"),
        (["rollout.top_p=0"], "rollout.top_p=0.0: must be greater than 0"),
        (["algorithm.loss_norm_constant=8"], "algorithm.loss_norm_constant=8.0: has an effect only with algorithm.loss_aggregation="),
        (
            ["algorithm.overlong_buffer_tokens=2"],
            "algorithm.overlong_buffer_tokens=2: has an effect only with algorithm.overlong_penalty. ",
        ),
        (
            ["algorithm.overlong_penalty=1", "algorithm.overlong_buffer_tokens=99", "rollout.max_response_tokens=10"],
            "algorithm.overlong_buffer_tokens=99: must be at most rollout.max_response_tokens (10). Use e.g. 2.",
        ),
        (["rollout=vllm", "rollout.options.gpus_per_engine=0"], "rollout.options.gpus_per_engine=0: must be greater than 0. "),
        *(
            (
                ["algorithm.group_size=1", f"algorithm.advantage={name}"],
                f"algorithm.group_size=1: algorithm.advantage={name} compares the samples of a prompt, so it needs at least 2. "
                "Use e.g. 8, or algorithm.advantage=reinforce_plus_plus.",
            )
            for name in ("grpo", "dr_grpo", "opo", "rloo", "maxrl", "reinforce_plus_plus_baseline")
        ),
    ],
)
def test_refused_choices(overrides: list[str], message: str) -> None:
    """What no engine takes, engines that the ranks cannot share evenly, and groups too small for an estimator, before anything starts."""
    with pytest.raises(ConfigError) as caught:
        compose_job(["experiment=embedded", *overrides])
    assert str(caught.value).startswith(message)


def test_a_backend_names_its_own_options(plugin: Write) -> None:
    """What another's options mean is checked as of ours, and told by their names."""
    body = """
        @dataclass
        class Options:
            gpus: int = 1
            apart: int = 0

        @hookimpl
        def rlbatch_register_rollout_backends():
            return {"mine": RolloutSpec(lambda context, options: 0, Options, ranks_option="gpus", separate_option="apart")}
        """
    job = [f"plugins=['{plugin(body)}']", "rollout=mine", "layout.world_size=4"]
    with pytest.raises(ConfigError, match=r"^rollout\.options\.gpus=3: must be at least 1 and divide layout\.world_size=4\."):
        compose_job([*job, "rollout.options.gpus=3"])
    config, registry = compose_job([*job, "rollout.options.gpus=2", "rollout.options.apart=8"])
    assert registry.ranks_per_engine(config) == 2
    with pytest.raises(ConfigError, match=r"^rollout\.options\.apart=8: as many of a node's GPUs have ranks, and a node has 8 "):
        place_ranks(config, registry)
    said = (
        r"^algorithm\.routing_replay=rollout: rollout=mine does not say which experts .*, or rollout=sglang, or rollout=transformers, or "
    )
    with pytest.raises(ConfigError, match=said + r"rollout=vllm\."):
        compose_job([*job, "algorithm.routing_replay=rollout"])


def test_options_of_an_engine_pass_through() -> None:
    """Whatever their names and types; the ranks of an engine are known."""
    config, registry = compose_job(
        ["rollout=vllm", "rollout.engine.a_b.c=[1,x]", "rollout.options.gpus_per_engine=2", "layout.world_size=4"]
    )
    assert config.rollout.engine == {"a_b": {"c": [1, "x"]}}
    assert registry.ranks_per_engine(config) == 2


@pytest.mark.parametrize(
    ("build", "message"),
    [
        ("lambda options: None", "what its build returns must be callable, is NoneType."),
        ("lambda options: options.nothing", "its build raised AttributeError: 'Options' object has no attribute 'nothing'"),
    ],
)
def test_a_reward_that_is_not_built(plugin: Write, build: str, message: str) -> None:
    """A build that forgets its return, or fails, is named."""
    body = f"""
        @dataclass(frozen=True)
        class Options:
            limit: int = 1

        @hookimpl
        def rlbatch_register_rewards():
            return {{"mine": Configurable({build}, Options)}}
    """
    with pytest.raises(PluginError, match=f"^reward=mine: {message}"):
        load_plugins([plugin(body)]).build_reward("mine", {})
