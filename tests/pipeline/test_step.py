"""The step on real ranks: what must be exactly equal, what must agree between engine and trainer, and independence of the layout."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from rlbatch.config.keys import EMBEDDED
from rlbatch.config.schema import Config
from rlbatch.config.sources import group_files
from tests.pipeline import steps
from tests.pipeline.steps import LAYOUTS, Steps, merged, prepared, small_config

TOLERANCE = 1e-4
LONG = pytest.mark.long("jobs", "models")
MEASURED = ("algorithm.kl_loss=true", "algorithm.kl_loss_coef=0.1")
"""The reference is then there, for an estimator that asks for log-probs."""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("run"))


def few_samples(layout: str, *overrides: str) -> Config:
    """As ``small_config``, half of its prompts."""
    return small_config(layout, "train.prompts_per_step=4", *overrides)


def world_size(layout: str) -> int:
    return 1 if layout == "1 rank" else 2


@pytest.fixture(scope="module")
def by_layout(run_dir: Path, rank_pool) -> dict[str, list[tuple[list[float], list[float], Steps]]]:
    """Importance ratios of the first step and two steps under each layout, with a KL term, so that every metric is there."""
    configs = {layout: few_samples(layout, *MEASURED) for layout in LAYOUTS}
    return {layout: rank_pool(world_size(layout)).run(steps.ratios, config, str(run_dir), 2) for layout, config in configs.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_first_update_has_ratio_one(layout: str, by_layout) -> None:
    """Every importance ratio of the first update is exactly 1; later ones are not."""
    seen = by_layout[layout]
    assert {ratio for first, _, _ in seen for ratio in first} == {1.0}
    assert any(ratio != 1.0 for _, later, _ in seen for ratio in later)
    assert seen[0][2].metrics[0]["train/ppo_kl"] != 0.0


@pytest.mark.parametrize("layout", ["pp2", "tp2 ep2", *(pytest.param(name, marks=LONG) for name in ("1 rank", "dp2", "ep2", "tp2"))])
def test_ppo_kl_and_kl_are_exactly_zero_at_first(layout: str, run_dir: Path, rank_pool) -> None:
    """One update: ppo_kl is 0.0; the policy is its own reference: kl is 0.0, though kl_loss with coefficient 0 does measure it later."""
    config = few_samples(layout, "train.updates_per_step=1", "algorithm.kl_loss=true")
    for rank in rank_pool(world_size(layout)).run(steps.steps, config, str(run_dir), 2):
        assert [metrics["train/ppo_kl"] for metrics in rank.metrics] == [0.0, 0.0]
        assert rank.metrics[0]["train/kl"] == 0.0
        assert rank.metrics[1]["train/kl"] > 1e-6
        assert rank.metrics[0]["train/grad_norm"] > 0


@pytest.mark.parametrize("layout", ["ep2", "pp2"])
def test_the_reference_stays_the_first_policy(layout: str, run_dir: Path, rank_pool) -> None:
    """Its log-probs equal the policy's bitwise before the first step and do not change; using it leaves the policy's weights bitwise."""
    for rank in rank_pool(2).run(steps.reference_is_the_first_policy, few_samples(layout, "algorithm.kl_loss=true"), str(run_dir)):
        assert rank["equal before"]
        assert rank["reference unchanged"]
        assert rank["difference after"] > 1e-3
        assert rank["restored"]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_trainer_and_engine_agree(temperature: float, run_dir: Path, rank_pool) -> None:
    """In fp32, log-probs of the sampled tokens differ by less than 1e-4 at every step, while updates move the policy by far more."""
    config = few_samples("ep2", f"rollout.temperature={temperature}", "optimizer.lr=2e-2")
    for rank in rank_pool(2).run(steps.steps, config, str(run_dir), 3):
        assert max(metrics["train/rollout_logprob_diff_max"] for metrics in rank.metrics) < TOLERANCE
        assert max(abs(metrics["train/ppo_kl"]) for metrics in rank.metrics) > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("layout", "override"), [("ep2", "rollout.top_p=0.6"), ("tp2 ep2", "rollout.top_k=5"), ("pp2", "rollout.top_p=0.8")]
)
def test_trainer_and_engine_agree_on_a_part_of_the_vocabulary(layout: str, override: str, run_dir: Path, rank_pool) -> None:
    """The same where tokens are chosen from the most likely alone; the entropy is of these too."""
    config = few_samples(layout, override, "rollout.temperature=0.6", "optimizer.lr=2e-2")
    for rank in rank_pool(2).run(steps.steps, config, str(run_dir), 2):
        assert max(metrics["train/rollout_logprob_diff_max"] for metrics in rank.metrics) < TOLERANCE
        assert max(abs(metrics["train/ppo_kl"]) for metrics in rank.metrics) > 100 * TOLERANCE
        assert 0.0 < rank.metrics[0]["train/entropy"] < math.log(64)


def test_the_agreement_check_sees_a_missing_weight_sync(run_dir: Path, rank_pool) -> None:
    """With rollout.sync_weights=false the difference is far above 1e-4, and rollout.max_logprob_diff ends the run before any update."""
    for override in ("train.updates_per_step=1", "train.updates_per_step=2", "algorithm.old_logprobs=rollout"):
        config = few_samples("ep2", "rollout.sync_weights=false", override)
        message, updates = rank_pool(2).run(steps.refused_step, config, str(run_dir), 1)[0]
        assert message.startswith("rollout.max_logprob_diff=0.0001: trainer and engine differ by ")
        assert updates == 0
    config = few_samples("ep2", "rollout.sync_weights=false", "rollout.max_logprob_diff=null")
    [metrics] = rank_pool(2).run(steps.steps, config, str(run_dir), 1)[0].metrics
    assert metrics["train/rollout_logprob_diff_max"] > 100 * TOLERANCE
    assert rank_pool(2).run(steps.refused_step, few_samples("ep2"), str(run_dir), 1) == [("", 2), ("", 2)]


@pytest.mark.parametrize("layout", [pytest.param("ep2", marks=LONG), "tp2 ep2", "pp2"])
def test_a_limit_from_this_models_rounding(layout: str, tmp_path: Path, rank_pool) -> None:
    """With rollout.max_logprob_diff=auto right steps go on, below half the limit."""
    config = few_samples(layout, "rollout.max_logprob_diff=auto", "optimizer.lr=2e-2")
    for rank in rank_pool(2).run(steps.steps, config, str(prepared(tmp_path)), 3):
        for metrics in rank.metrics:
            assert metrics["train/rollout_logprob_diff_mean"] < metrics["train/rollout_logprob_diff_limit"] / 2 < 1e-5
            assert {"mismatch/diff_first", "mismatch/diff_last", "mismatch/diff_at_1"} <= metrics.keys()


@pytest.mark.parametrize(("name", "factor"), [("layers.1.self_attn.o_proj", 1.01), ("layers.0.input_layernorm", 0.9)])
def test_an_engine_with_a_wrong_tensor_is_stopped(name: str, factor: float, tmp_path: Path, rank_pool) -> None:
    """With rollout.max_logprob_diff=auto, of which one row is off by a hundredth, or one value by a tenth: before any update."""
    config = few_samples("ep2", "rollout.max_logprob_diff=auto", "optimizer.lr=2e-2")
    for message, updates in rank_pool(2).run(steps.refused_engine, config, str(prepared(tmp_path)), f"model.{name}.weight", factor):
        assert re.match(r"rollout\.max_logprob_diff=auto: at most \S+ nats, 10 times what rounding does to this model: trainer", message)
        assert updates == 0


def test_the_agreement_check_sees_weights_that_are_one_step_old(run_dir: Path, rank_pool) -> None:
    """A sync that stops during the run shows at the next step."""
    config = few_samples("ep2", "optimizer.lr=2e-2", "rollout.max_logprob_diff=null")
    *synced, stale = rank_pool(2).run(steps.sync_stops_after_a_step, config, str(run_dir))[0]
    assert max(metrics["train/rollout_logprob_diff_max"] for metrics in synced) < TOLERANCE
    assert stale["train/rollout_logprob_diff_mean"] > 10 * TOLERANCE


def test_an_estimator_that_differs_between_ranks_is_refused(run_dir: Path, rank_pool) -> None:
    """Ranks that share a model would train it on different advantages: every rank says so."""
    for message in rank_pool(2).run(steps.estimated_differently, few_samples("ep2"), str(run_dir)):
        assert message.startswith("algorithm.advantage=grpo: ranks got different advantages for the same samples.")


@pytest.mark.parametrize(("layout", "size", "is_refused"), [("tp2", 1e-4, True), ("tp2", 0.0, False), ("ep2", 1e-4, False)])
def test_a_loss_that_differs_between_tensor_parallel_ranks_is_refused(
    layout: str, size: float, is_refused: bool, run_dir: Path, rank_pool
) -> None:
    """Each would train its part of the model on another loss: every rank says so before the first update. Other ranks have other tokens."""
    for message, updates in rank_pool(2).run(steps.lost_differently, few_samples(layout), str(run_dir), size):
        assert message.startswith("algorithm.loss=clip: tensor-parallel ranks got different losses") == is_refused
        assert updates == (0 if is_refused else 2)


SAMPLE = r"prompt \d+ sample \d \(reward [\d.]+\) has at token \d+ "


@pytest.mark.parametrize("layout", [pytest.param("dp2", marks=LONG), "ep2", "pp2"])
def test_a_loss_that_is_not_finite_ends_the_run(layout: str, run_dir: Path, rank_pool) -> None:
    """NaN on one rank: every rank says the same, with update, sample, reward, token and whose value it is; the weights are finite."""
    answers = rank_pool(2).run(steps.not_finite, few_samples(layout), str(run_dir), "loss", 3)
    assert len({error for *_, error, _ in answers}) == 1
    for _, _, error, is_finite in answers:
        assert re.match(
            rf"train\.on_nonfinite=stop: update \d of 2 of step \d must be finite, its loss is nan, .*: {SAMPLE}log-prob .*, loss nan: ",
            error,
        )
        assert "algorithm.loss gave the last" in error
        assert is_finite


@pytest.mark.parametrize(("what", "skipped"), [("loss", 4), ("log-prob", 2), ("own log-prob", 2)])
def test_what_is_not_finite_can_be_left_out(what: str, skipped: int, run_dir: Path, rank_pool) -> None:
    """Updates that are left out are told and counted, and the others are made; NaN log-probs leave out the step's; then the run goes on."""
    config = small_config("ep2", "train.on_nonfinite=skip", "rollout.max_logprob_diff=1")  # whose updates have several packs
    for metrics, told, error, is_finite in rank_pool(2).run(steps.not_finite, config, str(run_dir), what, 3):
        assert (error, is_finite, len(metrics)) == ("", True, 3)
        counts = [int(step["train/skipped_updates"]) for step in metrics]
        assert 6 > sum(counts) >= skipped
        assert all(("train/loss" in step) == (count < 2) for step, count in zip(metrics, counts, strict=True))
        assert re.match(
            rf"train\.on_nonfinite=skip: .* of step \d must be finite.*: {SAMPLE}.*{what.split()[-1]} nan: .* gave the last: left out$",
            told[0],
        )
        if what != "loss":
            assert counts == [0, 2, 0]
            assert re.search(r"log-probs of step 2 must be finite: .* a forward pass gave the last", told[0])
            assert ["mismatch/kl_k3" in step for step in metrics] == [True, False, True]


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "1 rank"])
def test_the_layout_does_not_matter(layout: str, by_layout) -> None:
    """From one seed, every layout samples the same tokens, has the same advantages and reports the same metrics for two steps."""
    [one], ranks = ([seen for _, _, seen in by_layout[name]] for name in ("1 rank", layout))
    for step in range(2):
        assert merged([rank.samples[step] for rank in ranks]) == one.samples[step]
        advantages = merged([rank.advantages[step] for rank in ranks])
        assert advantages == pytest.approx(one.advantages[step], abs=TOLERANCE)
        for rank in ranks:
            measured = {
                tag: value for tag, value in rank.metrics[step].items() if not tag.startswith(("time/", "perf/", "memory/", "rollout/"))
            }
            assert len(measured) > 15
            assert measured == pytest.approx({tag: one.metrics[step][tag] for tag in measured}, abs=TOLERANCE)


def test_metrics_differ_between_steps(by_layout) -> None:
    """The comparison of layouts compares something: the second step has other samples, and its policy has moved."""
    [(_, _, one)] = by_layout["1 rank"]
    assert one.samples[0] != one.samples[1]
    assert one.metrics[1]["train/kl"] > 10 * TOLERANCE


@pytest.mark.parametrize("layout", [*(pytest.param(name, marks=LONG) for name in ("1 rank", "dp2")), "ep2", "pp2"])
def test_kl_is_subtracted_from_the_reward(layout: str, run_dir: Path, rank_pool, other_model: Path) -> None:
    """Every sample's reward loses kl_reward_coef x the sum over its tokens of log policy - log reference, on any number of ranks."""
    coefficient = 0.3
    overrides = (f"checkpoint.load={run_dir}/{EMBEDDED}/model", f"checkpoint.ref_load={other_model}")
    config = few_samples(layout, *overrides, f"algorithm.kl_reward_coef={coefficient}", "algorithm.kl_kind=k1")
    ranks = rank_pool(world_size(layout)).run(steps.penalised_rewards, config, str(run_dir))
    samples, penalised = (merged([getattr(done, name)[0] for done, _ in ranks]) for name in ("samples", "advantages"))
    rewards = merged([given for _, given in ranks])
    kl = {key: expected_kl(tokens, run_dir / EMBEDDED / "model", other_model) for key, tokens in samples.items()}
    assert max(map(abs, kl.values())) > 0.05
    assert penalised == pytest.approx({key: rewards[key] - coefficient * kl[key] for key in samples}, abs=TOLERANCE)


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with other weights."""
    return prepared(tmp_path_factory.mktemp("other"), seed=7) / EMBEDDED / "model"


_LOADED: dict[Path, torch.nn.Module] = {}


def expected_kl(tokens: list[int], policy: Path, reference: Path) -> float:
    """By transformers: the log-ratio of both models, summed over the response (after the 4 tokens of the prompt)."""
    from transformers import AutoModelForCausalLM

    scores = []
    for folder in (policy, reference):
        if folder not in _LOADED:
            _LOADED[folder] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            logprobs = _LOADED[folder](torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        scores.append(logprobs.gather(-1, torch.tensor(tokens[1:])[:, None])[3:, 0].sum())
    return float(scores[0] - scores[1])


@pytest.mark.parametrize("layout", ["1 rank", "dp2"])
def test_truncated_responses_are_left_out(layout: str, run_dir: Path, rank_pool) -> None:
    """They have no advantage and no part in the loss; the others lose reward over the last tokens before the limit."""
    length = (
        "rollout.max_response_tokens=4",
        "algorithm.mask_truncated=true",
        "algorithm.overlong_penalty=0.5",
        "algorithm.overlong_buffer_tokens=2",
    )
    ranks = rank_pool(world_size(layout)).run(steps.cut_step, few_samples(layout, *length), str(run_dir), False)
    rows = [row for _, rows in ranks for row in rows]
    assert {is_cut for _, _, is_cut, _ in rows} == {True, False}
    assert [math.isnan(advantage) for *_, advantage in rows] == [is_cut for _, _, is_cut, _ in rows]
    kept = [(reward, tokens, advantage) for reward, tokens, is_cut, advantage in rows if not is_cut]
    penalty = {1: 0.0, 2: 0.0, 3: -0.25, 4: -0.5}
    assert [advantage for *_, advantage in kept] == pytest.approx([reward + penalty[tokens] for reward, tokens, _ in kept], abs=1e-6)
    assert ranks[0][0]["reward/mean"] == pytest.approx(sum(reward for reward, *_ in rows) / len(rows))


def test_a_step_whose_responses_are_all_cut_goes_on(run_dir: Path, rank_pool) -> None:
    """Its loss is 0, its advantages are none, and every metric is a number."""
    config = few_samples("dp2", "rollout.max_response_tokens=2", "algorithm.mask_truncated=true")
    (metrics, rows), _ = rank_pool(2).run(steps.cut_step, config, str(run_dir), True)
    assert all(is_cut for _, _, is_cut, _ in rows)
    assert all(map(math.isfinite, metrics.values())), metrics
    assert metrics["train/loss"] == metrics["train/grad_norm"] == metrics["advantage/abs_mean"] == 0


@pytest.mark.parametrize("loss", ["clip", "distill"])
def test_the_teacher_is_the_reference(loss: str, run_dir: Path, rank_pool, other_model: Path) -> None:
    """Distillation's advantage is what the reference's log-probs are above the policy's: minus the mean KL that is measured."""
    overrides = (f"checkpoint.load={run_dir}/{EMBEDDED}/model", f"checkpoint.ref_load={other_model}", "train.updates_per_step=1")
    config = few_samples(
        "dp2", *overrides, "algorithm.advantage=distill", f"algorithm.loss={loss}", "algorithm.kl_kind=k1", "algorithm.group_size=1"
    )
    [metrics] = rank_pool(2).run(steps.steps, config, str(run_dir), 1)[0].metrics
    assert abs(metrics["train/kl"]) > 1e-3
    assert metrics["advantage/mean"] == pytest.approx(-metrics["train/kl"], rel=1e-4)
    assert metrics["train/grad_norm"] > 0


@pytest.mark.parametrize(("layout", "old"), [("dp2", "recompute"), ("ep2", "rollout")])
def test_epochs_share_log_probs_and_advantages(layout: str, old: str, run_dir: Path, rank_pool) -> None:
    """Each pass has every token once, with the same old, engine's and reference log-probs, advantage and correction, whatever rank it is
    on; in other updates. The first one's old log-probs are of its own forward pass; with the engine's as old ones only the reference's
    forward pass is run.
    """
    correction = ["correction.weights=token", "correction.weight_high=2"] if old == "recompute" else ["algorithm.old_logprobs=rollout"]
    config = few_samples(layout, "train.epochs=2", "algorithm.kl_loss=true", *correction)
    ranks = rank_pool(2).run(steps.passes, config, str(run_dir))
    updates = [sorted(token[:5] for rank in ranks for token in rank.tokens[number]) for number in range(4)]
    assert all(len(rank.tokens) == 4 for rank in ranks)
    assert sorted(updates[0] + updates[1]) == sorted(updates[2] + updates[3])
    assert updates[0] not in updates[2:]
    for rank in ranks:
        assert rank.scored == (2 if old == "recompute" else 1)
        assert rank.had_old == [old == "rollout", True, True, True]
        assert all(token[1] == token[5] for token in rank.tokens[0]) == (old == "recompute")
        assert all(token[1] == token[2] for tokens in rank.tokens for token in tokens) == (old == "rollout")
        assert ("mismatch/kl_k3" in rank.metrics) == (old == "recompute")
        assert 0 < rank.metrics["train/rollout_logprob_diff_mean"] < TOLERANCE
        assert rank.metrics["train/skipped_updates"] == 0


CORRECTED = ("correction.weights=sequence", "correction.weight_high=1.0000001", "correction.opsm_delta=0")


@pytest.mark.parametrize(
    ("layout", "overrides", "share"),
    [
        ("1 rank", ("train.updates_per_step=1", "train.epochs=2"), 0.5),
        ("dp2", ("layout.cp_size=2", "train.updates_per_step=1", *CORRECTED), 0.5),
        ("pp2", ("train.updates_per_step=2", *CORRECTED), 0.75),
        ("tp2 ep2", ("train.updates_per_step=2", "algorithm.loss=gspo", "algorithm.loss_aggregation=sequence_mean"), 0.75),
        ("dp2", ("train.updates_per_step=1", "correction.reject.k1_token=[0.9999999,1.0000001]", "correction.denominator=kept"), 1.0),
        ("dp2", ("train.updates_per_step=1", "algorithm.kl_reward_coef=0.1"), 1.0),
    ],
)
def test_no_forward_pass_is_made_twice(layout: str, overrides: tuple[str, ...], share: float, run_dir: Path, rank_pool) -> None:
    """Two steps give bitwise the metrics and weights that they give with a pass for the old log-probs of all samples. Besides the
    reference's pass there is one for the samples of later updates, or for all where something needs them before the loss.
    """
    config = few_samples(layout, *MEASURED, "optimizer.lr=2e-2", *overrides)
    for without, asked in rank_pool(world_size(layout)).run(steps.with_and_without_a_pass, config, str(run_dir), 2):
        assert without[2] / asked[2] == pytest.approx(share, abs=0.1)
        assert all(torch.equal(without[1][name], asked[1][name]) for name in asked[1])
        for step, other in zip(without[0], asked[0], strict=True):
            own = {tag: value for tag, value in step.items() if not tag.startswith(("time/", "perf/", "memory/", "rollout/"))}
            assert own == {tag: other[tag] for tag in own}
            assert own["train/grad_norm"] > 0
            assert "mismatch/kl_k3" in own


@pytest.mark.parametrize(("layout", "replay"), [("dp2", "rollout"), ("pp2", "rollout"), ("tp2 ep2", "recorded"), ("pp2", "recorded")])
def test_routes_follow_their_tokens(layout: str, replay: str, run_dir: Path, rank_pool) -> None:
    """Each pass over the samples has the same experts at each token, whatever rank it is on; each stage those of its layers. Engine and
    trainer agree, and no token is routed by the trainer.
    """
    config = few_samples(layout, "train.epochs=2", f"algorithm.routing_replay={replay}", "algorithm.kl_loss=true", "optimizer.lr=2e-2")
    ranks = rank_pool(2).run(steps.routed, config, str(run_dir))
    shares = [[rank] for rank in ranks] if layout == "pp2" else [ranks]
    for share in shares:
        updates = [[token for seen, _ in share for token in seen[number]] for number in range(4)]
        assert sorted(updates[0] + updates[1]) == sorted(updates[2] + updates[3])
        assert min(map(len, updates)) > 0
    for _, metrics in ranks:
        assert metrics["train/rollout_logprob_diff_max"] < TOLERANCE
        assert metrics.get("train/native_routes") == (0.0 if replay == "rollout" else None)
        assert not any("first_other_experts" in tag for tag in metrics)


def test_the_engines_routes_decide(run_dir: Path, rank_pool) -> None:
    """Other experts, other log-probs; of some tokens no experts: these are counted, and routed as the engine did; of none: refused."""
    found = {}
    for seed, how in enumerate(("next", "some", "none")):  # another seed, or the groups of before are found finished
        config = few_samples("dp2", "algorithm.routing_replay=rollout", "rollout.max_logprob_diff=100", f"seed={seed}")
        found[how] = rank_pool(2).run(steps.with_other_routes, config, str(run_dir), how)[0]
    assert found["next"]["train/rollout_logprob_diff_mean"] > 10 * TOLERANCE
    assert found["next"]["mismatch/first_other_experts_0"] > 0.9  # of all tokens whose experts are others, in the first layer already
    assert sum(share for tag, share in found["next"].items() if "first_other_experts" in tag) <= 1
    assert found["some"]["train/rollout_logprob_diff_max"] < TOLERANCE
    assert 0.4 < found["some"]["train/native_routes"] < 0.7
    assert found["none"].startswith("algorithm.routing_replay=rollout: the engines gave no routes of this step's samples")


@pytest.mark.parametrize("recipe", group_files()["algorithm"])
def test_recipes_run(recipe: str, run_dir: Path, rank_pool) -> None:
    """Every file of configs/algorithm makes a step with finite metrics; engine and trainer agree, so corrections hardly change anything."""
    [metrics] = rank_pool(1).run(steps.steps, few_samples("1 rank", f"algorithm={recipe}"), str(run_dir), 1)[0].metrics
    assert all(map(math.isfinite, metrics.values()))
    assert metrics["train/grad_norm"] > 0
    assert abs(metrics["mismatch/kl_k3"]) < TOLERANCE
    assert metrics["mismatch/ess_corrected"] == pytest.approx(1, abs=TOLERANCE)
    assert metrics["mismatch/masked_sequences"] == 0
