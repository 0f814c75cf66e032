"""Tensors of a side on disk, and weights that are read when they are asked for."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from rlbatch.align.values.stored import FolderWeights, Stored, write
from rlbatch.checkpoint.hf import HfTensors
from tests import tiny_models
from tests.tiny_models import saved


def test_stored(tmp_path: Path) -> None:
    """What was put, or written by another process, is read back; a view takes no more than itself; the folder goes with the mapping."""
    stored: Stored[tuple[int, str]] = Stored(tmp_path)
    whole = torch.arange(100_000.0)
    stored.put((-1, "embedding"), whole[:3])
    write(stored.folder, (2, "mlp"), torch.ones(2))
    assert list(stored) == [(-1, "embedding")]
    stored.add([(2, "mlp")])
    assert torch.equal(stored[-1, "embedding"], torch.tensor([0.0, 1.0, 2.0]))
    assert torch.equal(stored[2, "mlp"], torch.ones(2))
    assert (2, "mlp") in stored
    with pytest.raises(KeyError):
        stored[0, "mlp"]
    assert sum(file.stat().st_size for file in stored.folder.iterdir()) < 10_000
    del stored
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_weights_of_a_folder(tmp_path: Path) -> None:
    """Cast when they are read; tied ones by either name; others in the place of the folder's."""
    folder = saved(tiny_models.tied(), tmp_path)
    embedding, norm = "model.embed_tokens.weight", "model.norm.weight"
    names = {embedding: embedding, "lm_head.weight": embedding, norm: norm}
    weights = FolderWeights(folder, names, torch.float64, {norm: torch.zeros(1), "extra": torch.ones(1)})
    assert set(weights) == {*names, "extra"}
    assert len(weights) == 4
    assert weights["lm_head.weight"].dtype == torch.float64
    assert torch.equal(weights["lm_head.weight"], HfTensors(folder).read(embedding).double())
    assert torch.equal(weights[norm], torch.zeros(1))
    assert "lm_head" not in weights
