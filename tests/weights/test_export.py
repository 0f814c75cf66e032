"""Exports under every layout: quantised where the shards are, experts to those who want them, bitwise what the whole tensor gives; and
the buckets in which they go to an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlbatch.checkpoint.hf import HfTensors
from rlbatch.weights import export as module
from rlbatch.weights.coverage import fp8_names, trained_names
from rlbatch.weights.export import MIB, buckets
from rlbatch.weights.quantize import SCALE_SUFFIX, quantize
from tests import tiny_models
from tests.weights.sharded import Exported, Layout, digest, export, exports, family_of

LAYOUTS = {
    "tp2 pp2 etp2": Layout(tp=2, pp=2, etp=2),
    "tp2 ep2 etp2": Layout(tp=2, ep=2, etp=2),
    "pp2 ep2": Layout(pp=2, ep=2),
    "tp2 ep4": Layout(tp=2, ep=4),
    "tp2 ep2": Layout(tp=2, ep=2),
    "pp2, two of a node": Layout(pp=2, node=2),
}
"""Of four ranks."""
MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "deepseek_v3": lambda: tiny_models.deepseek_v3(
        num_hidden_layers=3,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=256,
        q_lora_rank=128,
        kv_lora_rank=128,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
    ),
    "deepseek_v3, blocks cut": lambda: tiny_models.deepseek_v3(
        num_hidden_layers=3, hidden_size=160, intermediate_size=272, moe_intermediate_size=144
    ),
    "qwen3_moe": lambda: tiny_models.qwen3_moe(num_hidden_layers=2, hidden_size=256, moe_intermediate_size=256, head_dim=128),
    "qwen3_moe, blocks cut": lambda: tiny_models.qwen3_moe(num_hidden_layers=2, hidden_size=160, moe_intermediate_size=144, head_dim=64),
    "qwen2": lambda: tiny_models.qwen2(num_hidden_layers=2, hidden_size=256, intermediate_size=512, head_dim=64, tie_word_embeddings=True),
}
"""Widths that are multiples of 128, whole and in halves, and others; layers of each kind on both pipeline stages."""
ALL: list[None] = [None] * 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Each model in float32."""
    return {name: str(tiny_models.saved(build(), tmp_path_factory.mktemp("model"))) for name, build in MODELS.items()}


@lru_cache
def expected(folder: str, dtype: torch.dtype, *, is_fp8: bool) -> dict[str, str]:
    """Digests of the folder's trained tensors; quantised ones from bf16, whatever the policy is trained in."""
    family, tensors = family_of(folder), HfTensors(Path(folder))
    made: dict[str, Tensor] = {}
    for name in trained_names(family):
        tensor = tensors.read(name)
        if is_fp8 and name in fp8_names(family):
            made[name], made[name + SCALE_SUFFIX] = quantize(tensor.to(torch.bfloat16))
        else:
            made[name] = tensor.to(dtype)
    return {name: digest(tensor) for name, tensor in made.items()}


def differing(ours: dict[str, str], theirs: dict[str, str]) -> list[str]:
    return sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))


@pytest.mark.parametrize("model", MODELS)
def test_a_quantised_export_is_the_whole_tensor_quantised(model: str, folders, rank_pool) -> None:
    """Values and scales bitwise, on every rank, whether a rank's part has blocks of its own or cuts them; exactly the family's weights.

    Policies of both types in turns: every model and every layout has both.
    """
    turn, dtypes = list(MODELS).index(model), (torch.bfloat16, torch.float32)
    cases = [(layout, dtypes[(turn + number) % 2], True, ALL) for number, layout in enumerate(LAYOUTS.values())]
    ranks: list[list[Exported]] = rank_pool(4).run(exports, folders[model], cases)
    for number, (layout, dtype, _, _) in enumerate(cases):
        whole = expected(folders[model], dtype, is_fp8=True)
        for exported in (rank[number] for rank in ranks):
            assert differing(exported.tensors, whole) == [], layout
            assert exported.order == ranks[0][number].order
    quantised = fp8_names(family_of(folders[model]))
    assert quantised <= set(whole) and not [name for name in quantised if "norm" in name or "embed" in name or "gate.weight" in name]


@pytest.mark.parametrize("model", ["deepseek_v3", "qwen3_moe"])
def test_fp8_moves_where_blocks_align(model: str, folders, rank_pool) -> None:
    """Between ranks go half the bytes of bf16 and the scales, but for what stays in bf16 anyway."""
    cases = [(layout, torch.bfloat16, is_fp8, ALL) for layout in LAYOUTS.values() for is_fp8 in (False, True)]
    moved = [exported.nbytes for exported in rank_pool(4).run(exports, folders[model], cases)[0]]
    assert all(quantised < 0.56 * plain for plain, quantised in zip(moved[::2], moved[1::2], strict=True)), moved


WANTED = {
    "each its own": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "two engines of two": [[0, 2, 4, 6], [1, 3, 5, 7], [0, 1, 2, 3], [4, 5, 6, 7]],
    "any": [[7, 0, 3], None, [], [5]],
    "one of all": [[3], [3], [3], [3]],
}


@pytest.mark.parametrize("model", ["deepseek_v3", "qwen3_moe, blocks cut"])
def test_each_expert_goes_to_those_who_want_it(model: str, folders, rank_pool) -> None:
    """And to no other rank; all else to everyone. Places have one size on all ranks, so that buckets end at the same ones.

    Every layout with all sets and both types, and every set with both types.
    """
    pairs = [(row, column) for row in range(len(LAYOUTS)) for column in range(len(WANTED))]
    layouts, wanted = [*LAYOUTS.values()], [*WANTED.values()]
    cases = [(layouts[row], torch.bfloat16, (row + column) % 2 == 1, wanted[column]) for row, column in pairs]
    ranks: list[list[Exported]] = rank_pool(4).run(exports, folders[model], cases)
    for number, (layout, dtype, is_fp8, sets) in enumerate(cases):
        whole = expected(folders[model], dtype, is_fp8=is_fp8)
        for exported, experts in zip((rank[number] for rank in ranks), sets, strict=True):
            mine = range(8) if experts is None else experts
            due = {name: tensor for name, tensor in whole.items() if expert_of(name) in (None, *mine)}
            assert differing(exported.tensors, due) == [], (layout, sets)
            assert [rest for _, *rest in exported.order] == [rest for _, *rest in ranks[0][number].order]


def expert_of(name: str) -> int | None:
    _, found, rest = name.partition(".experts.")
    return int(rest.partition(".")[0]) if found else None


def test_fewer_bytes_arrive_where_experts_are_routed(folders, rank_pool) -> None:
    """Of eight experts two for each rank: a quarter of the experts' bytes, or less where the rank has some of them itself."""
    family, tensors = family_of(folders["qwen3_moe"]), HfTensors(Path(folders["qwen3_moe"]))
    of_experts = sum(tensors.stored(name).entry.nbytes // 2 for name in trained_names(family) if expert_of(name) is not None)
    layouts = [LAYOUTS[name] for name in ("tp2 ep4", "tp2 ep2", "pp2 ep2", "tp2 pp2 etp2")]
    cases = [(layout, torch.bfloat16, False, sets) for layout in layouts for sets in (ALL, [[]] * 4, WANTED["each its own"])]
    for rank in rank_pool(4).run(exports, folders["qwen3_moe"], cases):
        for everything, others, routed in zip(*(iter([exported.nbytes for exported in rank]),) * 3, strict=True):
            assert routed - others <= of_experts / 4
            assert everything - others >= of_experts / 2


def test_buckets_end_at_the_same_places() -> None:
    """An empty tensor counts and does not travel; ranks with other experts have as many buckets, some of them empty."""
    megabyte = torch.zeros(2**20, dtype=torch.uint8)
    mine = [("a", megabyte), ("b", megabyte), ("c", megabyte)]
    theirs = [("a", megabyte), ("", megabyte.to("meta")), ("", megabyte.to("meta"))]
    assert [bucket.names for bucket in buckets(mine, 2, 0)] == [["a", "b"], ["c"]]
    assert [bucket.names for bucket in buckets(theirs, 2, 0)] == [["a"], []]


def one_after_the_other(folder: str, layout: Layout) -> list[Exported]:
    """Exports with experts gathered at once, and one by one."""
    at_once, limit = export(folder, layout, torch.bfloat16, True, ALL), module.AT_ONCE_BYTES
    module.AT_ONCE_BYTES = 0
    try:
        return [at_once, export(folder, layout, torch.bfloat16, True, ALL)]
    finally:
        module.AT_ONCE_BYTES = limit


def test_large_experts_are_gathered_one_by_one(folders, rank_pool) -> None:
    """Memory does not grow with the number of expert-parallel ranks; order and values are the same."""
    for first, second in rank_pool(4).run(one_after_the_other, folders["qwen3_moe"], LAYOUTS["tp2 ep2 etp2"]):
        assert first.order == second.order
        assert differing(first.tensors, second.tensors) == []


def sized(*mib: float) -> list[tuple[str, torch.Tensor]]:
    return [(f"t{index}", torch.zeros(int(size * MIB), dtype=torch.uint8)) for index, size in enumerate(mib)]


def test_no_bucket_is_larger_than_the_limit() -> None:
    """Tensors share a bucket up to the limit, in order, each in exactly one; all carry the policy's version."""
    made = list(buckets(sized(1, 1, 0.5, 2, 0.5, 0.5), 2, policy_version=7))
    assert [list(bucket.names) for bucket in made] == [["t0", "t1"], ["t2"], ["t3"], ["t4", "t5"]]
    assert all(sum(tensor.nbytes for tensor in bucket.tensors) <= 2 * MIB for bucket in made)
    assert {bucket.policy_version for bucket in made} == {7}


def test_a_larger_tensor_travels_alone() -> None:
    """It is neither refused nor joined by others."""
    assert [list(bucket.names) for bucket in buckets(sized(0.5, 5, 0.5), 2, 0)] == [["t0"], ["t1"], ["t2"]]
    assert [list(bucket.names) for bucket in buckets(sized(5, 5, 0.5), 2, 0)] == [["t0"], ["t1"], ["t2"]]


def test_sizes_are_bytes_not_elements() -> None:
    """2^19 float32 elements are two MiB."""
    wide = [("t0", torch.zeros(MIB, dtype=torch.uint8)), ("t1", torch.zeros(MIB // 2))]
    assert [list(bucket.names) for bucket in buckets(wide, 2, 0)] == [["t0"], ["t1"]]


def test_tensors_are_taken_only_when_their_bucket_is() -> None:
    """The trainer's stream never runs ahead by more than the tensor that did not fit: no second copy of the model."""
    taken: list[str] = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in sized(1, 1, 1, 1, 1, 1):
            taken.append(name)
            yield name, tensor

    next(buckets(stream(), 2, 0))
    assert taken == ["t0", "t1", "t2"]


def test_nothing_is_no_bucket() -> None:
    """An engine is not called with empty buckets."""
    assert list(buckets([], 2, 0)) == []


def test_what_stays_until_the_end_of_a_sync_is_marked() -> None:
    """Views of the trainer's memory can be read in place; what was put together for this bucket not."""
    own, made = torch.zeros(4), torch.zeros(4)
    storages = {own.untyped_storage().data_ptr()}
    (bucket,) = buckets([("a", own[1:3]), ("b", made), ("c", own)], 1, 0, lasting=storages)
    assert bucket.lasting == [True, False, True]
    assert not bucket.is_carried
