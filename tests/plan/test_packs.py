"""``train.max_tokens_per_gpu=auto``: the largest packs that fit, told with why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlbatch.api import ConfigError
from rlbatch.plan.estimate import estimate_memory
from rlbatch.plan.packs import ROUNDS, check_packs, packs_chosen
from tests.plan.planned import plan

AUTO = "train.max_tokens_per_gpu=auto"
QWEN = ("+cluster=h100x8", "layout.world_size=8", AUTO, "rollout.max_response_tokens=4096", "data.max_prompt_tokens=1024")


def chosen(*overrides: str, has: float = 0.0) -> tuple[int, str]:
    """Tokens and why, on GPUs of so many GiB; 0: of the cluster's."""
    job = plan(*QWEN, *overrides).job
    cluster = replace(job.config.cluster, gpu_memory_gib=has or job.config.cluster.gpu_memory_gib)
    config = replace(job.config, cluster=cluster, train=replace(job.config.train, max_tokens_per_gpu="auto"))
    after, why = packs_chosen(config, replace(job, config=config))
    assert after.train.max_tokens_per_gpu != "auto"
    return after.train.pack_tokens, why


def test_more_memory_larger_packs() -> None:
    """Each size is taken from some memory on; what is chosen fits with the error of plans, the next larger does not."""
    sizes = [chosen(has=has)[0] for has in range(30, 160, 5)]
    assert sizes == sorted(sizes)
    assert {16384, 32768} <= set(sizes)
    for has in (40, 45, 50, 60):
        tokens, _ = chosen(has=has)
        memory = estimate_memory(plan(*QWEN, f"train.max_tokens_per_gpu={tokens}", f"cluster.gpu_memory_gib={has}").job)
        larger = estimate_memory(plan(*QWEN, f"train.max_tokens_per_gpu={2 * tokens}", f"cluster.gpu_memory_gib={has}").job)
        needs = [peak.gib + spread for each in (memory, larger) for peak, spread in [each.gpu_of_stage(0, "update")]]
        assert tokens in (8192, 32768) or needs[0] <= has < needs[1]


def test_at_least_the_longest_sample() -> None:
    """It forms a pack anyway: of fewer tokens none is smaller. Divided over context-parallel ranks."""
    assert chosen("rollout.max_response_tokens=30000", has=1)[0] == 31024
    assert chosen("rollout.max_response_tokens=30000", "layout.cp_size=2", has=1)[0] == 15512
    assert chosen("rollout.max_response_tokens=60000", has=1000) == (61024, "fits 1000 GiB a GPU; the longest sample has 61024 a GPU")


def test_a_pipeline_keeps_its_microbatches() -> None:
    """Larger packs would be faster, and the stages wait for each other."""
    pipeline = ("layout.pp_size=2", "layout.ep_size=4", "train.prompts_per_step=64", "algorithm.group_size=8")
    tokens, _ = chosen(*pipeline, has=1000)
    assert tokens < 32768 == chosen(*pipeline, "train.prompts_per_step=4096", has=1000)[0]
    assert ROUNDS == 4


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"on_gpu": False}, "no GPUs"),
        ({"model": None}, "the model is not known"),
        (None, "the model is not known"),
    ],
)
def test_where_memory_is_not_known(changes: dict[str, object] | None, why: str) -> None:
    """4096, as without this, and what is missing."""
    job = plan(*QWEN).job
    config = replace(job.config, train=replace(job.config.train, max_tokens_per_gpu="auto"))
    after, said = packs_chosen(config, None if changes is None else replace(job, config=config, **changes))
    assert (after.train.max_tokens_per_gpu, said) == (4096, why)
    unsaid = replace(config, cluster=replace(config.cluster, gpu_memory_gib=0.0))
    assert packs_chosen(unsaid, replace(job, config=unsaid))[1] == "cluster.gpu_memory_gib does not say what a GPU has"


def test_a_number_stays() -> None:
    """What was asked for is not judged here."""
    config = plan(*QWEN, "train.max_tokens_per_gpu=777").job.config
    assert packs_chosen(config, None) == (config, "")


def test_packs_that_do_not_fit() -> None:
    """Refused with the most that fits, to 512 tokens; what may fit is not, nor what the longest sample takes anyway."""
    job = plan(*QWEN, "train.max_tokens_per_gpu=200000").job
    with pytest.raises(ConfigError, match=r"^train.max_tokens_per_gpu=200000: packs must fit a GPU, in updates these need ") as refused:
        check_packs(job)
    fits = int(str(refused.value).rpartition("Use ")[2].partition(" ")[0])
    needs = []
    for tokens in (fits, fits + 512):
        smaller = replace(job, config=replace(job.config, train=replace(job.config.train, max_tokens_per_gpu=tokens)))
        check_packs(smaller)
        peak, spread = estimate_memory(smaller).gpu_of_stage(0, "update")
        needs.append(peak.gib + spread)
    assert needs[0] <= job.config.cluster.gpu_memory_gib < needs[1]
    check_packs(plan(*QWEN, "train.max_tokens_per_gpu=200000", "rollout.max_response_tokens=200000").job)
