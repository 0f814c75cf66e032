"""Exporting takes no copy of the model: beside the parameters there are a few tensors, however many experts and ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from rlbatch.api import Direct, ExpertDown, ExpertGated, ModelFamily, Vocab
from rlbatch.weights import export
from rlbatch.weights.export import buckets
from rlbatch.weights.params import ParallelGroups, ParameterMap
from tests.weights.test_load_memory import MIB, peak_memory

EXPERTS, WIDTH, HIDDEN, VOCAB = 32, 512, 2048, 4096
FAMILY = ModelFamily(
    name="large",
    transformer={"num_layers": 3, "num_attention_heads": 2, "num_moe_experts": EXPERTS},
    vocab_size=VOCAB,
    rotary_base=1.0,
    tie_embeddings=True,
    max_sequence_length=8,
    mappings=(
        Vocab("embedding", "embed"),
        Direct("{layer}.dense", "{layer}.dense", tp_dim=0),
        ExpertGated("{layer}.gate_up", "{layer}.{expert}.gate", "{layer}.{expert}.up"),
        ExpertDown("{layer}.down", "{layer}.{expert}.down"),
    ),
    fp8=frozenset({"{layer}.dense", "{layer}.{expert}.gate", "{layer}.{expert}.up", "{layer}.{expert}.down"}),
)
LARGEST = 2 * VOCAB * HIDDEN
"""Bytes of the embedding in bf16, 16 MiB; of an expert's parts together 6 MiB."""
BUCKET_MIB = 12


def grown(quantize: bool, is_routed: bool) -> int:
    """By how many bytes this rank's memory grew while it exported in buckets, each dropped for the next.

    The least of three times, after one in which the libraries take memory: what else happens in the process only adds to it.
    """
    world, rank = dist.group.WORLD, dist.get_rank()
    solo = [dist.new_group([0]), dist.new_group([1])][rank]
    export.AT_ONCE_BYTES = BUCKET_MIB * MIB
    params = {"embedding": torch.ones(VOCAB // 2, HIDDEN, dtype=torch.bfloat16)}
    for layer in range(3):
        params |= {
            f"{layer}.dense": torch.ones(HIDDEN // 2, HIDDEN, dtype=torch.bfloat16),
            f"{layer}.gate_up": torch.ones(EXPERTS // 2, 2 * WIDTH, HIDDEN, dtype=torch.bfloat16),
            f"{layer}.down": torch.ones(EXPERTS // 2, HIDDEN, WIDTH, dtype=torch.bfloat16),
        }
    mapping = ParameterMap(FAMILY, ParallelGroups(tp=world, etp=solo, ep=world, pp=solo))
    wanted = list(range(8, 24)) if is_routed else None  # half of them another rank's
    grew: list[int] = []
    for _ in range(4):
        before = peak_memory(reset=True)
        for bucket in buckets(mapping.export(params, quantize=quantize, wanted=wanted), BUCKET_MIB, 0):
            assert bucket.names
            del bucket
        grew.append(peak_memory() - before)
    return min(grew[1:])


@pytest.mark.parametrize("is_routed", [False, True])
@pytest.mark.parametrize("quantize", [False, True])
def test_memory_while_exporting(quantize: bool, is_routed: bool, rank_pool) -> None:
    """Two ranks with 300 MiB each that send every expert to both, or to those who want it: at most twice the larger of a bucket and the
    largest tensor on top, and what gloo copies.
    """
    for rank in rank_pool(2).run(grown, quantize, is_routed):
        assert rank < 2 * max(BUCKET_MIB * MIB, LARGEST) + 16 * MIB, rank / MIB
