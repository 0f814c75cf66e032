"""Every tag that a step may report, with its unit: the one place where they are defined. docs/use/metrics.md is kept equal by a test."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Tag:
    """A number that a step reports.

    Attributes:
        tag: ``group/name``, as in TensorBoard.
        unit: Unit of the value.
        doc: What it measures.
    """

    tag: str
    unit: str
    doc: str


DROPPED_BY = "dropped_by_"
_DEFINED = (
    Tag("reward/mean", "reward", "Mean over the step's samples."),
    Tag("reward/std", "reward", "Standard deviation over the step's samples."),
    Tag("reward/min", "reward", "Smallest of the step's samples."),
    Tag("reward/max", "reward", "Largest of the step's samples."),
    Tag("reward/errors", "1", "Samples without a verdict since the step before: their reward raised, gave up, or its worker died."),
    Tag("reward/timeouts", "1", "Samples without a verdict since the step before: their reward was past reward.timeout_s."),
    Tag("reward/eval", "reward", "Mean over responses to held-out prompts at train.eval_temperature; only on steps that evaluate."),
    Tag("advantage/mean", "advantage", "Mean over sampled tokens."),
    Tag("advantage/abs_mean", "advantage", "Mean absolute value over sampled tokens; 0: nothing to learn from."),
    Tag("response/length_mean", "tokens", "Mean response length, the stop token included."),
    Tag("response/length_max", "tokens", "Longest response."),
    Tag("response/clip_ratio", "share", "Responses that were cut at rollout.max_response_tokens."),
    Tag(
        "sampling/sampled",
        "groups",
        "Groups that were sampled to the end and scored in this step; as all of sampling/ only with sampling.*.",
    ),
    Tag("sampling/accepted", "groups", "Those of them that passed all filters."),
    Tag(f"sampling/{DROPPED_BY}<filter>", "groups", "Those that this filter dropped, as the first of those that refuse them."),
    Tag("sampling/all_right", "groups", "Sampled groups whose rewards are all equal, and above 0."),
    Tag("sampling/all_wrong", "groups", "Sampled groups whose rewards are all equal, and not above 0."),
    Tag("sampling/accepted_length", "tokens", "Mean response length of the accepted groups."),
    Tag("sampling/dropped_length", "tokens", "Mean response length of the dropped groups."),
    Tag("sampling/rounds", "1", "Rounds of new prompts."),
    Tag("sampling/carried", "groups", "Accepted groups that wait for the next step."),
    Tag("sampling/unfinished", "groups", "Groups with responses that go on in the next step (sampling.partial_tokens)."),
    Tag("sampling/stale", "groups", "Accepted groups that waited so long that they were dropped (sampling.max_version_lag)."),
    Tag("sampling/skipped_steps", "1", "1: the step made no update, as no group was accepted, or too few (sampling.on_shortage=skip)."),
    Tag("sampling/lag_max", "policy versions", "Age of the oldest token that an update used."),
    Tag("sampling/trained_share", "share", "Of the tokens that the run has sampled so far, those that an update used."),
    Tag(
        "train/native_routes",
        "share",
        "Of the tokens that engines read, those whose experts they did not tell; only with algorithm.routing_replay=rollout.",
    ),
    Tag(
        "train/skipped_updates",
        "1",
        "Updates that were not made, as loss, gradients or log-probs were not finite (train.on_nonfinite=skip).",
    ),
    Tag("train/loss", "1", "What the optimizer minimises, mean over the step's updates."),
    Tag("train/ppo_kl", "nats", "Mean of old less current log-prob: how far the step's updates moved the policy."),
    Tag("train/kl", "nats", "KL to the reference model (algorithm.kl_kind), mean over sampled tokens; only if the reference is loaded."),
    Tag("train/entropy", "nats", "Entropy of the policy, mean over sampled tokens."),
    Tag("train/clip_fraction", "share", "Sampled tokens where a bound of the policy loss is active."),
    Tag("train/grad_norm", "1", "Global gradient norm before clipping, mean over the step's updates."),
    Tag("train/lr", "1", "Learning rate of the step's last update."),
    Tag(
        "train/rollout_logprob_diff_mean",
        "nats",
        "Trainer and engine log-probs: mean absolute difference; with algorithm.old_logprobs=rollout only of the first update's tokens.",
    ),
    Tag(
        "train/rollout_logprob_diff_max",
        "nats",
        "Trainer and engine log-probs: largest absolute difference, of the same tokens.",
    ),
    Tag("train/rollout_logprob_diff_limit", "nats", "Largest accepted mean; only with rollout.max_logprob_diff=auto."),
    Tag("mismatch/diff_at_<n>", "nats", "train/rollout_logprob_diff_mean of responses' n-th to (2n - 1)-th tokens; n: 1, 2, 4, ..."),
    Tag(
        "mismatch/diff_<kind>", "nats", "The same of their first and last tokens, those with digits, those repeated (one of the 8 before)."
    ),
    Tag(
        "mismatch/first_other_experts_<n>",
        "share",
        "Of one pack a rank, tokens for which layer n is the first in which trainer and engine choose other experts; only with "
        "algorithm.routing_replay=rollout, which makes the engine's choice hold.",
    ),
    Tag("mismatch/kl_k1", "nats", "KL of the engine to the trainer by k1: mean of engine's less trainer's log-prob."),
    Tag("mismatch/kl_k3", "nats", "The same by k3: mean of w - 1 - log(w), where w is trainer's over engine's probability of a token."),
    Tag("mismatch/chi2_token", "1", "Chi-square divergence over tokens: mean of w^2, less 1."),
    Tag("mismatch/chi2_sequence", "1", "The same over sequences, each with the product of its w."),
    Tag("mismatch/ppl_ratio", "1", "Perplexity of a response by the trainer over that by the engine, mean over responses."),
    Tag("mismatch/ratio_max", "1", "Largest w."),
    Tag("mismatch/ess", "share", "Effective sample size of the w of all tokens: (sum w)^2 / (n sum w^2)."),
    Tag("mismatch/ess_corrected", "share", "The same of the weights of the policy loss after correction.*; 1 if nothing is corrected."),
    Tag("mismatch/masked_tokens", "share", "Sampled tokens that correction.* rejected."),
    Tag("mismatch/masked_sequences", "share", "Responses of which correction.* rejected at least one token."),
    Tag(
        "rollout/idle_fraction",
        "share",
        "1 - mean / largest of the seconds in which each engine had prompts: engine time lost on waiting for the slowest engine.",
    ),
    Tag(
        "rollout/longest_sample_s",
        "s",
        "The slowest sample of all engines, from where its engine begins to work on it to its end, if they measure it.",
    ),
    Tag("rollout/tokens_per_s", "tokens/s", "Tokens sampled in this step over the seconds in which the slowest engine had prompts."),
    Tag("rollout/engine_restarts", "1", "Restarts of lost engines, of all engines, since this attempt of the job began."),
    Tag("perf/tokens_per_s", "tokens/s", "Prompt and response tokens of the step over its duration, all ranks together."),
    Tag("perf/tokens_per_s_per_gpu", "tokens/s", "perf/tokens_per_s over the number of ranks."),
    Tag(
        "perf/mfu",
        "share",
        "Model FLOPs utilisation of log-probs and updates; the peak is `cluster.gpu_bf16_tflops`, else the card's bf16 figure by its name, "
        "else measured.",
    ),
    Tag("time/step_s", "s", "The whole step, evaluation and checkpoint not included."),
    Tag("time/sync_s", "s", "Weights to the engines."),
    Tag(
        "time/offload_s",
        "s",
        "Optimizer state that leaves or comes back, as far as that is waited for; the rest is beside other phases (offload).",
    ),
    Tag("time/restart_s", "s", "Lost engines started anew and given the weights; only in steps that lost one."),
    Tag("time/rollout_s", "s", "Generation."),
    Tag("time/reward_s", "s", "Rewards that are not known yet when generation ends."),
    Tag("time/exchange_s", "s", "Advantages, exchange over data-parallel ranks, packing."),
    Tag("time/logprobs_s", "s", "Old and reference log-probs."),
    Tag("time/update_s", "s", "Forward, backward and optimizer."),
    Tag("time/eval_s", "s", "Held-out evaluation."),
    Tag("time/checkpoint_s", "s", "Writing a checkpoint; with checkpoint.async_save what training waits for, also when it is completed."),
    Tag("memory/rss_gib", "GiB", "Resident memory of rank 0's process."),
    Tag("memory/gpu_sync_gib", "GiB", "As gpu_allocated_gib, while weights are sent."),
    Tag("memory/gpu_rollout_gib", "GiB", "As gpu_allocated_gib, during generation; an engine in a process of its own not included."),
    Tag("memory/gpu_logprobs_gib", "GiB", "As gpu_allocated_gib, during log-probs."),
    Tag("memory/gpu_update_gib", "GiB", "As gpu_allocated_gib, during updates."),
    Tag("memory/gpu_used_sync_gib", "GiB", "Used of rank 0's GPU by all processes, engines too, when the sync ended; only with a GPU."),
    Tag("memory/gpu_used_rollout_gib", "GiB", "The same at the end of generation, before the engine sleeps."),
    Tag("memory/gpu_used_logprobs_gib", "GiB", "The same after log-probs, while the engine sleeps."),
    Tag("memory/gpu_used_update_gib", "GiB", "The same after updates."),
    Tag("memory/node_used_sync_gib", "GiB", "Used of the memory of rank 0's node by all processes, when the sync ended."),
    Tag("memory/node_used_rollout_gib", "GiB", "The same at the end of generation."),
    Tag("memory/node_used_logprobs_gib", "GiB", "The same after log-probs."),
    Tag("memory/node_used_update_gib", "GiB", "The same after updates."),
    Tag("memory/gpu_allocated_gib", "GiB", "Peak of tensors on rank 0's GPU during the step; only with a GPU."),
    Tag("memory/gpu_reserved_gib", "GiB", "Peak of what PyTorch reserved on rank 0's GPU during the step; only with a GPU."),
)

PARTS = re.compile(r"reward/[A-Za-z][A-Za-z0-9_.-]*")
"""Pattern of the tags for a reward's own parts."""
TAGS: Mapping[str, Tag] = {tag.tag: tag for tag in _DEFINED}

PATTERNS = (
    Tag("eval/<set>/avg@<n>", "reward", "Mean reward over the n responses to each prompt of eval.sets.<set>; only on steps that evaluate."),
    Tag("eval/<set>/avg@<n>_se", "reward", "Standard error of that mean, over prompts; with two prompts or more."),
    Tag("eval/<set>/pass@<k>", "share", "Probability that at least one of k responses is correct, estimated without bias."),
    Tag("eval/<set>/majority@<k>", "share", "How often the answer that most of k responses give is correct."),
    Tag("eval/<set>/length_mean", "tokens", "Mean response length, the stop token included."),
    Tag("eval/<set>/truncated", "share", "Responses that were cut at the set's max_response_tokens."),
    Tag("eval/<set>/errors", "1", "Samples without a verdict, which count 0: their reward raised, gave up, or its worker died."),
    Tag("eval/<set>/timeouts", "1", "Samples without a verdict, which count 0: their reward was past reward.timeout_s."),
)
"""Tags of evaluation sets, which a config names."""
BESIDE_PLAN = (
    Tag("plan_vs_actual/<phase>_s", "1", "Seconds of sync (with time/offload_s), rollout, logprobs, update or step over what is planned."),
    Tag("plan_vs_actual/<what>_<phase>", "1", "The same of what gpu, trainer or node use in GiB in these phases."),
)
"""Tags that compare a step with its plan."""
_NAMES = {
    "<set>": r"[\w.-]+",
    "<n>": r"\d+",
    "<k>": r"\d+",
    "<filter>": ".+",
    "<kind>": "first|last|digits|repeated",
    "<phase>": "[a-z]+",
    "<what>": "gpu|trainer|node",
}
_PATTERN = re.compile(
    "|".join(
        re.sub("<.*?>", lambda found: f"({_NAMES[found[0]]})", tag.tag) for tag in (*_DEFINED, *PATTERNS, *BESIDE_PLAN) if "<" in tag.tag
    )
)


def check_tags(tags: Iterable[str]) -> None:
    """Checks a step's tags (or its metrics) against ``TAGS``.

    Raises:
        ValueError: a tag is not defined here.
    """
    for tag in tags:
        if tag not in TAGS and not any(known.fullmatch(tag) for known in (PARTS, _PATTERN)):
            close = difflib.get_close_matches(tag, TAGS, n=3) or sorted(TAGS)
            raise ValueError(
                f"metric {tag!r} is not defined in rlbatch/metrics/names.py. Define it there, or use one of: {', '.join(close)}."
            )
