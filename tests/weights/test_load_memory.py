"""Loading takes no second copy of what is loaded: parameters are filled in chunks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rlbatch.api import Direct, ExpertDown, Gated, ModelFamily, Vocab
from rlbatch.checkpoint.hf import HfTensors
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
