"""Tokens by seed and position: as likely as they are, whatever is drawn beside them, in torch and in the kernel for GPUs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlbatch_plugins.vllm_host import seeded_draws
from rlbatch_plugins.vllm_host.seeded_draws import Seed, draw, seeds_of
from tests.plugins.vllm_cases import vllm_python


def numbered(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Seeds and positions of a batch."""
    return torch.arange(rows) // 4 * 7919, torch.arange(rows) % 4


def test_tokens_are_as_likely_as_they_are() -> None:
    """Chi-square of 200,000 draws within six standard deviations; a token of probability 0 is never drawn, one of 1e-5 twice or so."""
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.09999, 0.0, 1e-5], dtype=torch.float64)
    counts = draw(probabilities.log().float().repeat(200_000, 1), *numbered(200_000)).bincount(minlength=6)
    expected = 200_000 * probabilities
    assert counts[4] == 0
    assert counts[5] <= 10
    assert float(((counts - expected)[:4] ** 2 / expected[:4]).sum()) < 3 + 6 * 6**0.5


def test_rows_do_not_know_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, in another order, and where a batch is drawn in parts."""
    logits, (seeds, positions) = torch.randn(64, 300, generator=torch.Generator().manual_seed(0)), numbered(64)
    together, order = draw(logits, seeds, positions), torch.randperm(64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(draw(logits[order], seeds[order], positions[order]), together[order])
    assert [int(draw(logits[row : row + 1], seeds[row : row + 1], positions[row : row + 1])) for row in range(64)] == together.tolist()
    monkeypatch.setattr(seeded_draws, "AT_ONCE", 1000)
    assert torch.equal(draw(logits, seeds, positions), together)
    assert len(draw(logits[:1].repeat(64, 1), seeds, positions).unique()) > 40


def test_small_changes_of_logits_seldom_change_a_token() -> None:
    """As often as the distributions differ, not as often as their sums do: rounding of 1e-3 changes about one in a thousand."""
    logits, noise = torch.randn(4000, 1000), 1e-3 * torch.randn(4000, 1000)
    assert int((draw(logits, *numbered(4000)) != draw(logits + noise, *numbered(4000))).sum()) < 20


def test_a_batch_has_a_seed_for_each_row() -> None:
    """Those of its generators, also the largest; others, of greedy samples, are no one's; a batch without generators has none."""
    generators = {0: torch.Generator().manual_seed(5), 2: torch.Generator().manual_seed(2**64 - 1)}
    metadata = SimpleNamespace(generators=generators)
    seeds = seeds_of(metadata, 3, torch.device("cpu"))
    assert seeds is not None
    assert (seeds[0], seeds[2]) == (5, -1)
    assert all(isinstance(generator, Seed) for generator in generators.values())
    assert seeds_of(metadata, 3, torch.device("cpu")) is seeds
    assert seeds_of(SimpleNamespace(generators=generators), 3, torch.device("cpu"))[2] == -1  # type: ignore[index]
    assert seeds_of(SimpleNamespace(generators={}), 3, torch.device("cpu")) is None


def test_the_kernel_draws_the_same(repository: Path, tmp_path: Path) -> None:
    """By Triton's interpreter; and it compiles for an A100 and an H200."""
    (tmp_path / "rlbatch_plugins").symlink_to(repository / "plugins")
    python, script = vllm_python(repository), str(Path(__file__).with_name("draws_by_triton.py"))
    variables = {"PYTHONPATH": f"{repository}:{tmp_path}", "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    for interpret, expected in (("1", {"rows": 40, "same": 40}), ("0", {"compiled": [80, 90]})):
        variables["TRITON_INTERPRET"] = interpret
        done = subprocess.run([python, script], env=variables, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1]) == expected
