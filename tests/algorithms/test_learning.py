"""Each loss with each estimator raises the reward of a small task, and lowers it with negated advantages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlbatch.algorithms.advantages import advantage_inputs, token_advantages
from rlbatch.algorithms.aggregate import denominator
from rlbatch.algorithms.objective import Objective
from rlbatch.config.schema import AlgorithmConfig
from rlbatch.pipeline.packing import build_microbatches, with_advantages
from tests.algorithms.loss_tables import registry

PROMPTS, SAMPLES, TOKENS, LENGTH = 4, 8, 5, 3
RIGHT = torch.arange(PROMPTS) % TOKENS


def learned(loss: str, advantage: str, sign: float) -> tuple[float, float]:
    """Expected reward of a policy that is one table, before and after six steps: it should name the prompt's token at every position."""
    algorithm = AlgorithmConfig(loss=loss, advantage=advantage, loss_aggregation="sequence_mean")
    objective, estimator = Objective(algorithm, registry().build_loss(algorithm)), registry().build_advantage(algorithm)
    generator = torch.Generator().manual_seed(0)
    table = torch.zeros(PROMPTS, TOKENS, requires_grad=True)
    teacher = torch.zeros(PROMPTS, TOKENS)
    teacher[torch.arange(PROMPTS), RIGHT] = 3.0
    optimizer = torch.optim.SGD([table], lr=2.0)
    prompt = torch.arange(PROMPTS).repeat_interleave(SAMPLES)

    def expected_reward() -> float:
        return float(table.detach().softmax(-1)[torch.arange(PROMPTS), RIGHT].mean())

    def scores(logits: Tensor, tokens: Tensor) -> Tensor:
        """[N x (1 + LENGTH)]: of the response's tokens, and 0 for the prompt's."""
        chosen = logits.log_softmax(-1)[prompt].gather(-1, tokens)
        return torch.nn.functional.pad(chosen, (1, 0)).flatten()

    before = expected_reward()
    for _ in range(6):
        with torch.no_grad():
            tokens = torch.multinomial(table.softmax(-1)[prompt], LENGTH, replacement=True, generator=generator)
            old, ref = scores(table, tokens), scores(teacher, tokens)
        rewards = (tokens == RIGHT[prompt, None]).double().mean(-1)
        lengths = torch.full((len(prompt),), LENGTH)
        kept = old != 0
        inputs = advantage_inputs(rewards, prompt, lengths, old_logprobs=old[kept].double(), ref_logprobs=ref[kept].double())
        advantages = sign * token_advantages(advantage, estimator, inputs).tokens()
        mask = [torch.tensor([0.0] + [1.0] * LENGTH) for _ in prompt]
        rows = [torch.cat([torch.zeros(1, dtype=torch.int64), row]) for row in tokens]
        [pack] = with_advantages(
            build_microbatches(rows, mask, list(old.split(LENGTH + 1)), max_tokens=10**6), list(advantages.split(LENGTH))
        )
        pack.microbatch.old_logprobs, pack.microbatch.ref_logprobs = old, ref
        total = denominator(pack.microbatch.loss_mask, pack.microbatch.cu_seqlens, "sequence_mean")
        for _ in range(2):
            optimizer.zero_grad()
            objective(scores(table, tokens), torch.zeros(len(old)), pack.microbatch, total).loss.backward()
            optimizer.step()
    return before, expected_reward()


@pytest.mark.parametrize("advantage", registry().advantages)
@pytest.mark.parametrize("loss", registry().losses)
def test_the_reward_rises(loss: str, advantage: str) -> None:
    """By six steps of two updates each; with negated advantages it falls, but for a loss that takes no advantages."""
    before, after = learned(loss, advantage, 1.0)
    assert after > before + 0.05
    before, after = learned(loss, advantage, -1.0)
    assert (after > before) if loss == "distill" else (after < before - 0.02)
