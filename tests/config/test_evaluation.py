"""What a config says of evaluations: sets by names of the user's, their metrics, and what cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlbatch.api import ConfigError
from rlbatch.config.compose import compose, load_config, save_config
from rlbatch.config.evaluation import eval_sets, ks, limit_key, longest_response, needs_reward, scores
from rlbatch.config.schema import AlgorithmConfig, Config, EvalSetConfig
from rlbatch.config.structured import key_docs

AIME = "eval.sets.aime"
SET = (f"{AIME}.file=aime.jsonl",)
METRIC = "must be a metric of an evaluation."


def test_a_set_has_its_own_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the command line, as one mapping and from config.yaml; its path is made absolute, what is text stays so; --help has the keys."""
    monkeypatch.chdir(tmp_path)
    config = compose(
        [*SET, "eval.sets.aime.n=8", "eval.sets.aime.top_p=0.95", "eval.sets.m-2.file=007", "eval.sets.m-2.k=[1,3]", "eval.sets.m-2.n=3"]
    )
    assert config.eval.sets == {
        "aime": EvalSetConfig(str(tmp_path / "aime.jsonl"), n=8, top_p=0.95),
        "m-2": EvalSetConfig(str(tmp_path / "007"), n=3, k=(1, 3)),
    }
    assert compose([f"eval.sets={{a:{{file:{tmp_path}/x,n:2}}}}"]).eval.sets == {"a": EvalSetConfig(f"{tmp_path}/x", n=2)}
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config
    assert {"eval.sets", "eval.sets.<name>.n", "eval.sets.<name>.file"} <= {doc.name for doc in key_docs(Config)}


def test_the_sets_of_a_job() -> None:
    """The simple form comes first, with train.eval_*; lengths without a limit of their own have the rollout's."""
    config = compose(["train.eval_prompts=7", "train.eval_temperature=0.5", *SET, "eval.sets.aime.max_response_tokens=9"])
    simple, aime = eval_sets(config).values()
    assert simple == EvalSetConfig("embedded", 7, temperature=0.5, max_response_tokens=config.rollout.max_response_tokens)
    assert aime.max_response_tokens == 9
    assert longest_response(config) == (9, "eval.sets.aime.max_response_tokens")
    assert [limit_key(config, name) for name in ("eval", "aime")] == ["rollout.max_response_tokens", "eval.sets.aime.max_response_tokens"]
    assert limit_key(compose(list(SET)), "aime") == "rollout.max_response_tokens"
    assert list(eval_sets(compose(["data.eval="]))) == []


def test_the_jobs_reward_is_needed_where_something_has_no_other() -> None:
    """Training, and sets that name none; not where each set names its own."""
    alone = ["mode=eval", "data.eval=", *SET]
    assert needs_reward(compose([]))
    assert needs_reward(compose(alone))
    assert not needs_reward(compose([*alone, f"{AIME}.reward=number"]))
    assert needs_reward(compose([*alone[:1], *SET, f"{AIME}.reward=number"]))


@pytest.mark.parametrize(
    ("n", "chosen", "expected"), [(1, (), (1,)), (8, (), (1, 2, 4, 8)), (10, (), (1, 2, 4, 8)), (8, (5, 1, 5), (1, 5))]
)
def test_the_k(n: int, chosen: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Powers of 2 up to n, or those that are named, each once."""
    assert ks(EvalSetConfig(n=n, k=chosen)) == expected


def test_metrics_of_a_set() -> None:
    """avg, pass and majority by their tags; data.eval has its mean reward alone."""
    assert scores("a", EvalSetConfig(n=2)) == {
        "eval/a/avg@2": "avg@2", "eval/a/pass@1": "pass@1", "eval/a/pass@2": "pass@2", "eval/a/majority@2": "majority@2"
    }  # fmt: skip
    assert scores("eval", EvalSetConfig()) == {"reward/eval": "avg@1"}


def test_an_evaluation_alone_has_nothing_of_training() -> None:
    """What trains is as if nobody had asked for it: nothing checks it, and no memory is counted for it."""
    config = compose(["mode=eval", "algorithm.kl_loss=true", "checkpoint.export_hf=true", "checkpoint.best=reward/eval"])
    assert (config.data.train, config.algorithm, config.offload.name) == ("", AlgorithmConfig(), "none")
    assert (config.checkpoint.save_interval, config.checkpoint.export_hf, config.checkpoint.best) == (-1, False, "")
    assert config.data.eval == "embedded"


REFUSED = [
    ([f"{AIME}.n=4"], f"{AIME}.file=: must not be empty, a set needs prompts. Give {AIME}.file=<prompt file>."),
    ([*SET, f"{AIME}.template_options.tokenize=true"], f"{AIME}.template_options.tokenize: rlbatch says that itself"),
    ([*SET, f"{AIME}.fil=x"], f"{AIME}.fil: unknown key. Did you mean `{AIME}.file`?"),
    ([*SET, f"{AIME}.temperature=-1"], f"{AIME}.temperature=-1.0: must be 0 or more. Use e.g. 1.0."),
    ([*SET, f"{AIME}.temperature=1e-5"], f"{AIME}.temperature=1e-05: must be 0, or 0.001 or more: logits"),
    ([*SET, f"{AIME}.top_p=0"], f"{AIME}.top_p=0.0: must be greater than 0. Use e.g. 1.0."),
    ([*SET, f"{AIME}.top_p=1.5"], f"{AIME}.top_p=1.5: must be 1 or less. Use e.g. 1.0."),
    ([*SET, f"{AIME}.n=0"], f"{AIME}.n=0: must be greater than 0. Use e.g. 1."),
    ([*SET, f"{AIME}.n=many"], f"{AIME}.n=many: must be an integer, not `many`."),
    ([*SET, f"{AIME}.n=4", f"{AIME}.k=[1,8]"], f"{AIME}.k=[1,8]: must be at most the samples of a prompt, {AIME}.n=4."),
    ([*SET, f"{AIME}.n=4", f"{AIME}.k=[0]"], f"{AIME}.k[0]=0: must be greater than 0."),
    ([*SET, f"{AIME}.n=4", f"{AIME}.temperature=0"], f"{AIME}.n=4: with temperature=0 all samples of a prompt are the same."),
    ([*SET, f"{AIME}.n=4", f"{AIME}.top_k=1"], f"{AIME}.n=4: with top_k=1 all samples of a prompt are the same."),
    ([*SET, f"{AIME}.reward_options.limit=1"], f"{AIME}.reward_options: has an effect only with {AIME}.reward."),
    (["eval.sets.eval.file=x"], "eval.sets.eval: is the name of the set that data.eval is. Choose another name."),
    ([f"{AIME}=5"], f"{AIME}=5: is a group of keys."),
    ([*SET, "checkpoint.best=eval/aim/avg@1"], f"checkpoint.best=eval/aim/avg@1: {METRIC} Did you mean `eval/aime/avg@1`"),
    ([*SET, "checkpoint.best=eval/aime/pass@8"], f"checkpoint.best=eval/aime/pass@8: {METRIC} Did you mean `eval/aime/pass@1`"),
    (["data.eval=", "checkpoint.best=reward/eval"], "checkpoint.best=reward/eval: nothing is evaluated. Give eval.sets.<name>.file="),
    (["checkpoint.best=reward/eval", "checkpoint.save_interval=-1"], "checkpoint.best=reward/eval: needs checkpoints, and"),
    (["mode=eval", "data.eval="], "mode=eval: there is nothing to evaluate, data.eval is empty and there are no eval.sets."),
    (["mode=eval", "resume=auto"], "resume=auto: mode=eval goes on with no run, and has a run_dir of its own."),
    (["mode=evaluate"], "mode=evaluate: must be `train` or `eval`"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_what_cannot_be(overrides: list[str], message: str) -> None:
    """One message, with the key, what must hold and what to write."""
    with pytest.raises(ConfigError) as refused:
        compose(overrides)
    assert str(refused.value).startswith(message)
