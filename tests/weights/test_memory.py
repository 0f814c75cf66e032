"""Neither loading nor exporting takes a copy of the model: parameters are filled in chunks, and beside them there are a few tensors."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from rlbatch.api import Direct, ExpertDown, ExpertGated, Gated, ModelFamily, Vocab
from rlbatch.checkpoint.hf import HfTensors
from rlbatch.weights import export
from rlbatch.weights.export import buckets
from rlbatch.weights.params import ParallelGroups, ParameterMap

MIB = 2**20
SECOND_OF_TWO: Any = SimpleNamespace(size=lambda: 2, rank=lambda: 1)
ROWS, COLUMNS, VOCAB = 8192, 8192, 20000
FAMILY = ModelFamily(
    name="large",
    transformer={"num_layers": 1, "num_attention_heads": 2, "num_moe_experts": 2},
    vocab_size=VOCAB,
    rotary_base=1.0,
    tie_embeddings=True,
    max_sequence_length=8,
    mappings=(
        Vocab("embedding", "embed"),
        Direct("whole", "whole"),
        Direct("columns", "columns", tp_dim=1),
        Gated("gated", "gate", "up"),
        ExpertDown("down", "down.{expert}"),
    ),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tensors of 40 to 128 MiB, bf16 and fp8."""
    folder = tmp_path_factory.mktemp("large")
    fp8 = torch.arange(ROWS * COLUMNS, dtype=torch.int32).remainder_(120).to(torch.uint8).view(torch.float8_e4m3fn).view(ROWS, COLUMNS)
    scales = torch.rand(ROWS // 128, COLUMNS // 128) + 0.5
    save_file(
        {"whole": fp8, "whole_scale_inv": scales, "columns": fp8.clone(), "columns_scale_inv": scales.clone()}, folder / "a.safetensors"
    )
    save_file({"embed": torch.rand(VOCAB, 1024, dtype=torch.bfloat16), "down.1": fp8.bfloat16()}, folder / "b.safetensors")
    halves = {"gate": fp8[: ROWS // 2].clone(), "up": fp8[ROWS // 2 :].clone(), "down.0": torch.zeros(1, 2)}
    halves |= {f"{name}_scale_inv": scales[: ROWS // 256].clone() for name in ("gate", "up")}
    save_file(halves, folder / "c.safetensors")
    return folder


def test_memory_while_loading(folder: Path) -> None:
    """The second of two ranks, whose parameters have 340 MiB: at most 64 MiB come on top, whatever a tensor's size, and no byte is read
    that the rank does not need.
    """
    groups = ParallelGroups(tp=SECOND_OF_TWO, etp=SECOND_OF_TWO, ep=SECOND_OF_TWO, pp=SECOND_OF_TWO)
    shapes = {
        "embedding": (VOCAB // 2, 1024),
        "whole": (ROWS, COLUMNS),
        "columns": (ROWS, COLUMNS // 2),
        "gated": (ROWS // 2, COLUMNS),
        "down": (1, ROWS, COLUMNS // 2),
    }
    params = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    for param in params.values():
        param.fill_(1)  # touches every page
    tensors, done = HfTensors(folder), []
    before = peak_memory(reset=True)
    ParameterMap(FAMILY, groups).load(params, tensors.source, done.append)
    assert peak_memory() - before < 64 * MIB
    total = sum(param.nbytes for param in params.values())
    assert sum(done) == total > 330 * MIB
    fp8 = sum(params[name].numel() for name in ("whole", "columns", "gated"))
    weights = total - fp8  # fp8 takes half of bf16
    assert weights <= tensors.bytes_read < weights + MIB  # and scales
    assert torch.equal(params["columns"], tensors.read("columns")[:, COLUMNS // 2 :])
    assert torch.equal(params["gated"], torch.cat([tensors.read(name)[ROWS // 4 :] for name in ("gate", "up")]))
    assert torch.equal(params["embedding"], tensors.read("embed")[VOCAB // 2 :])


def peak_memory(*, reset: bool = False) -> int:
    """Largest resident memory of this process since the last reset, bytes."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024


EXPERTS, WIDTH, HIDDEN, EXPORTED_VOCAB = 32, 512, 2048, 4096
EXPORTED = ModelFamily(
    name="large",
    transformer={"num_layers": 3, "num_attention_heads": 2, "num_moe_experts": EXPERTS},
    vocab_size=EXPORTED_VOCAB,
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
LARGEST = 2 * EXPORTED_VOCAB * HIDDEN
"""Bytes of the embedding in bf16, 16 MiB; of an expert's parts together 6 MiB."""
BUCKET_MIB = 12


def grown(quantize: bool, is_routed: bool) -> int:
    """By how many bytes this rank's memory grew while it exported in buckets, each dropped for the next.

    The least of three times, after one in which the libraries take memory: what else happens in the process only adds to it.
    """
    world, rank = dist.group.WORLD, dist.get_rank()
    solo = [dist.new_group([0]), dist.new_group([1])][rank]
    export.AT_ONCE_BYTES = BUCKET_MIB * MIB
    params = {"embedding": torch.ones(EXPORTED_VOCAB // 2, HIDDEN, dtype=torch.bfloat16)}
    for layer in range(3):
        params |= {
            f"{layer}.dense": torch.ones(HIDDEN // 2, HIDDEN, dtype=torch.bfloat16),
            f"{layer}.gate_up": torch.ones(EXPERTS // 2, 2 * WIDTH, HIDDEN, dtype=torch.bfloat16),
            f"{layer}.down": torch.ones(EXPERTS // 2, HIDDEN, WIDTH, dtype=torch.bfloat16),
        }
    mapping = ParameterMap(EXPORTED, ParallelGroups(tp=world, etp=solo, ep=world, pp=solo))
    wanted = list(range(8, 24)) if is_routed else None  # half of them another rank's
    grew: list[int] = []
    for _ in range(4):
        before = peak_memory(reset=True)
        for bucket in buckets(mapping.export(params, quantize=quantize, wanted=wanted), BUCKET_MIB, 0):
            assert bucket.names
            del bucket
        grew.append(peak_memory() - before)
    return min(grew[1:])


@pytest.mark.parametrize(
    ("quantize", "is_routed"),
    [
        (False, False),
        (True, True),
        pytest.param(False, True, marks=pytest.mark.long("models")),
        pytest.param(True, False, marks=pytest.mark.long("models")),
    ],
)
def test_memory_while_exporting(quantize: bool, is_routed: bool, rank_pool) -> None:
    """Two ranks with 300 MiB each that send every expert to both, or to those who want it: at most twice the larger of a bucket and the
    largest tensor on top, and what gloo copies.
    """
    for rank in rank_pool(2).run(grown, quantize, is_routed):
        assert rank < 2 * max(BUCKET_MIB * MIB, LARGEST) + 16 * MIB, rank / MIB
