"""What each kind of mapping means, against layouts written out by hand."""

from __future__ import annotations

import pytest
import torch

from rlbatch.api import Buffer, DataError, Direct, ExpertDown, ExpertGated, Gated, ParamMapping, Qkv, Vocab
from rlbatch.weights import codec
from rlbatch.weights.codec import Geometry, hf_names, shard, unshard

GEOMETRY = Geometry(num_experts=4, heads=6, kv_heads=2, vocab_size=7)
HEAD_DIM, HIDDEN = 4, 8
DIRECT = Direct("decoder.layers.{layer}.norm.weight", "model.layers.{layer}.norm.weight")
ROW = Direct("decoder.layers.{layer}.proj.weight", "model.layers.{layer}.o_proj.weight", tp_dim=1)
VOCAB = Vocab("embedding.weight", "model.embed_tokens.weight")
QKV = Qkv("decoder.layers.{layer}.qkv.weight", "q.{layer}", "k.{layer}", "v.{layer}")
GATED = Gated("decoder.layers.{layer}.fc1.weight", "gate.{layer}", "up.{layer}")
EXPERT_GATED = ExpertGated("decoder.layers.{layer}.gate_up", "{layer}.{expert}.gate", "{layer}.{expert}.up")
EXPERT_DOWN = ExpertDown("decoder.layers.{layer}.down", "{layer}.{expert}.down")


def numbered(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Tensors in which every element is different."""
    tensors, start = [], 0
    for shape in shapes:
        size = torch.Size(shape).numel()
        tensors.append(torch.arange(start, start + size, dtype=torch.float32).view(shape))
        start += size
    return tensors


CASES: list[tuple[ParamMapping, list[torch.Tensor]]] = [
    (DIRECT, numbered((HIDDEN,))),
    (ROW, numbered((HIDDEN, 12))),
    (VOCAB, numbered((7, HIDDEN))),
    (QKV, numbered((6 * HEAD_DIM, HIDDEN), (2 * HEAD_DIM, HIDDEN), (2 * HEAD_DIM, HIDDEN))),
    (QKV, numbered((6 * HEAD_DIM,), (2 * HEAD_DIM,), (2 * HEAD_DIM,))),
    (GATED, numbered((10, HIDDEN), (10, HIDDEN))),
    (EXPERT_GATED, numbered((10, HIDDEN), (10, HIDDEN))),
    (EXPERT_DOWN, numbered((HIDDEN, 10))),
]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("mapping", "tensors"), CASES)
def test_unshard_is_the_inverse_of_shard(mapping: ParamMapping, tensors: list[torch.Tensor], size: int) -> None:
    """Hugging Face tensors survive the way to all shards and back bitwise."""
    shards = [shard(mapping, tensors, GEOMETRY, size, rank) for rank in range(size)]
    assert len({part.shape for part in shards}) == 1
    back = unshard(mapping, shards, GEOMETRY)
    assert len(back) == len(tensors)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(back, tensors, strict=True))


def test_qkv_is_grouped_by_key_value_head() -> None:
    """Megatron's rows: the queries of the first key-value head, its key, its value, then the same of the second, on the second rank."""
    query, key, value = numbered((6 * HEAD_DIM, HIDDEN), (2 * HEAD_DIM, HIDDEN), (2 * HEAD_DIM, HIDDEN))
    for head in range(2):
        expected = torch.cat([query[12 * head : 12 * head + 12], key[4 * head : 4 * head + 4], value[4 * head : 4 * head + 4]])
        assert torch.equal(shard(QKV, [query, key, value], GEOMETRY, 2, head), expected)


def test_gate_and_up_are_cut_before_they_are_joined() -> None:
    """Each rank's rows of gate, then its rows of up."""
    gate, up = numbered((10, HIDDEN), (10, HIDDEN))
    for mapping in (GATED, EXPERT_GATED):
        assert torch.equal(shard(mapping, [gate, up], GEOMETRY, 2, 1), torch.cat([gate[5:], up[5:]]))


def test_down_is_cut_by_columns() -> None:
    """What an expert's gate rows feed."""
    (down,) = numbered((HIDDEN, 10))
    assert torch.equal(shard(EXPERT_DOWN, [down], GEOMETRY, 2, 1), down[:, 5:])


def test_vocabulary_is_padded_with_zero_rows() -> None:
    """7 rows over 2 ranks: 4 each, the last one 0; the checkpoint gets its 7 rows back."""
    (rows,) = numbered((7, HIDDEN))
    last = shard(VOCAB, [rows], GEOMETRY, 2, 1)
    assert torch.equal(last, torch.cat([rows[4:], torch.zeros(1, HIDDEN)]))


def test_replicated_tensors_are_whole_on_every_rank() -> None:
    """A Direct mapping without tp_dim."""
    (norm,) = numbered((HIDDEN,))
    assert all(torch.equal(shard(DIRECT, [norm], GEOMETRY, 2, rank), norm) for rank in range(2))


def test_names() -> None:
    """Placeholders are filled with global indices, in the order of the tensors; what lies outside the layers has no index."""
    assert hf_names(QKV, 1) == ("q.1", "k.1", "v.1")
    assert hf_names(EXPERT_GATED, 1, 3) == ("1.3.gate", "1.3.up")
    assert hf_names(VOCAB, None) == ("model.embed_tokens.weight",)


class Lazy:
    """A source that notes what is taken from it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        self.taken: list[torch.Tensor] = []

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        self.taken.append(self._tensor[index])
        return self.taken[-1].clone()


@pytest.mark.parametrize("chunk_bytes", [1, 40, 2**20])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("mapping", "tensors"), CASES)
def test_sources_are_cut_before_they_are_read(
    mapping: ParamMapping, tensors: list[torch.Tensor], size: int, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard takes its elements and no others, in chunks under the limit (or single rows), and is what whole tensors give."""
    monkeypatch.setattr(codec, "CHUNK_BYTES", chunk_bytes)
    for rank in range(size):
        sources = [Lazy(tensor) for tensor in tensors]
        ours = shard(mapping, sources, GEOMETRY, size, rank)
        assert torch.equal(ours, shard(mapping, tensors, GEOMETRY, size, rank))
        taken = [part for source in sources for part in source.taken]
        padding = HIDDEN if mapping is VOCAB and size == 2 and rank == 1 else 0
        assert sum(part.numel() for part in taken) == ours.numel() - padding
        assert all(part.nbytes <= chunk_bytes or len(part) == 1 for part in taken)
        elements = torch.cat([part.flatten() for part in taken]).sort().values
        assert torch.equal(elements, ours.flatten().sort().values[-len(elements) :])


def test_a_buffer_is_whole_on_every_rank() -> None:
    """Also one without dimensions."""
    for tensor in (torch.arange(3.0), torch.tensor(2.0)):
        assert all(torch.equal(shard(Buffer("bias", "hf.bias"), [tensor], GEOMETRY, 2, rank), tensor) for rank in range(2))


@pytest.mark.parametrize(
    ("mapping", "shapes", "message"),
    [
        (ROW, [(8, 11)], r"o_proj\.weight: shapes \(8, 11\): dimension 1 must be divisible by 2"),
        (ROW, [(8,)], r"o_proj\.weight: shapes \(8,\): dimension 1 must be divisible by 2"),
        (VOCAB, [(8, 8)], r"embed_tokens\.weight: shapes \(8, 8\): must have 7 rows"),
        (QKV, [(24, 8), (8, 8), (4, 8)], r"q\.\{layer\} \+ k\.\{layer\} \+ v\.\{layer\}: shapes .*: must be 6 query heads and 2 key"),
        (QKV, [(8, 8), (24, 8), (24, 8)], "must be 6 query heads"),
        (QKV, [(24, 8), (8, 9), (8, 9)], "must be 6 query heads"),
        (GATED, [(10, 8), (12, 8)], "must have one shape"),
        (EXPERT_GATED, [(5, 8), (5, 8)], "dimension 0 must be divisible by 2"),
        (EXPERT_DOWN, [(8, 5)], "dimension 1 must be divisible by 2"),
    ],
)
def test_shapes_that_would_be_cut_wrongly_are_refused(mapping: ParamMapping, shapes: list[tuple[int, ...]], message: str) -> None:
    """Nothing is rounded down, and no tensor is taken for another."""
    with pytest.raises(DataError, match=message):
        shard(mapping, [torch.zeros(shape) for shape in shapes], GEOMETRY, 2, 0)
