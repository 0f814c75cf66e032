"""A checkpoint of any layout goes on under another: weights, main weights, moments and step counts are resharded."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlbatch.checkpoint.torch_dist import COMMON
from rlbatch.checkpoint.unpickle import METADATA, read_metadata
from rlbatch.config.schema import LayoutConfig
from rlbatch.megatron.checkpoint import _make_state
from rlbatch.testing.gradients import worst
from tests import tiny_models
from tests.convert.test_dist import run
from tests.megatron import checkpoint, stock
from tests.megatron.test_gradients import LAYOUTS, TOLERANCE

ONE = LayoutConfig(world_size=1)
MODELS = {
    "qwen3_moe": tiny_models.qwen3_moe,
    "deepseek_v3": tiny_models.deepseek_v3,
    "qwen2 tied": lambda: tiny_models.qwen2(tie_word_embeddings=True),
}
CASES = [
    ("qwen3_moe", "vpp2 pp2"),
    *(pytest.param("qwen3_moe", layout, marks=pytest.mark.long("models")) for layout in ("ep4", "tp2 pp2 ep2", "tp2 cp2 ep2")),
    pytest.param("deepseek_v3", "pp4", marks=pytest.mark.long("models")),
    ("deepseek_v3", "tp2 pp2 ep2"),
    ("qwen2 tied", "tp2 pp2"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: tiny_models.saved(build(), tmp_path_factory.mktemp("model")) for name, build in MODELS.items()}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def one_rank(model: str, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, rank_pool):
    """The third update of one process, and its checkpoint after the second."""
    state = tmp_path_factory.mktemp("one") / "state"
    return (*rank_pool(1).run(checkpoint.save_between_updates, str(folders[model]), ONE, str(state))[0], state)


class EngineAdam(torch.optim.Adam):
    """Stands for Transformer Engine's FusedAdam, which needs CUDA: it counts steps by group, and its ``load_state_dict`` copies all
    moments that it is given.
    """

    def initialize_state(self, *arguments: object) -> None:
        """Tells it from torch's."""

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        raise AssertionError("all moments twice")


def test_moments_are_made_once() -> None:
    """Where a load would take eight bytes a parameter more than training, a job that filled its GPU could not be resumed."""
    inner, made = EngineAdam([torch.nn.Parameter(torch.ones(3))]), []
    _make_state(SimpleNamespace(optimizer=inner, init_state_fn=made.append), 7)
    assert made == [inner]
    assert [group["step"] for group in inner.param_groups] == [7]


@pytest.mark.parametrize(("model", "name"), CASES, indirect=["model"], scope="module")
def test_from_one_rank_to_many_and_back(model: str, name: str, folders: dict[str, Path], one_rank, tmp_path: Path, rank_pool) -> None:
    """The third update, after a load from one rank's checkpoint and after a load of the layout's own on one rank, is that of one process:
    gradient norm and weights within 1e-5 (biases of experts to the bit), while the update moves the weights far more.
    """
    want, report, state = one_rank
    folder, layout = folders[model], LAYOUTS[name]
    pool = rank_pool(layout.world_size)
    loaded = pool.run(checkpoint.load_and_update, str(folder), layout, str(state))
    pool.run(checkpoint.save_between_updates, str(folder), layout, str(tmp_path / "state"))
    back = rank_pool(1).run(checkpoint.load_and_update, str(folder), ONE, str(tmp_path / "state"))
    for ranks in (loaded, back):
        weights, got, _ = ranks[0]
        error, parameter = worst(weights, want)
        assert error <= TOLERANCE, f"{parameter}: {error:.2e}"
        assert all(weights[bias].equal(want[bias]) for bias in want if bias.endswith("e_score_correction_bias"))
        assert got["grad_norm"] == pytest.approx(report["grad_norm"], rel=TOLERANCE)
        assert {step for _, _, steps in ranks for step in steps} == {3.0}


@pytest.mark.parametrize("model", ["qwen3_moe"], indirect=True, scope="module")
def test_an_update_is_seen(model: str, folders: dict[str, Path], one_rank, rank_pool) -> None:
    """The tolerance of the comparison is far below what updates change."""
    want, _, _ = one_rank
    fresh, _ = rank_pool(1).run(checkpoint.first_update, str(folders[model]), ONE)[0]
    assert worst(fresh, want)[0] > 100 * TOLERANCE


@pytest.mark.parametrize("model", ["deepseek_v3"], indirect=True, scope="module")
def test_megatrons_own_format(model: str, folders: dict[str, Path], one_rank, tmp_path: Path, rank_pool) -> None:
    """What Megatron writes, which gathers main weights and moments as our older checkpoints did, goes on as ours do."""
    want, report, _ = one_rank
    layout = LAYOUTS["ep2"]
    rank_pool(layout.world_size).run(stock.save_gathered, str(folders[model]), layout, str(tmp_path / "state"))
    weights, got, steps = rank_pool(1).run(checkpoint.load_and_update, str(folders[model]), ONE, str(tmp_path / "state"))[0]
    assert worst(weights, want)[0] <= TOLERANCE
    assert got["grad_norm"] == pytest.approx(report["grad_norm"], rel=TOLERANCE)
    assert steps == {3.0}


class Touches:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self._path}",)


def saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def in_metadata(folder: Path, trap: Touches) -> None:
    """The metadata itself is the trap."""
    (folder / METADATA).write_bytes(pickle.dumps(trap))


def in_common(folder: Path, trap: Touches) -> None:
    """The plain values are."""
    (folder / COMMON).write_bytes(saved({"args": trap}))


def in_a_tensor(folder: Path, trap: Touches) -> None:
    """A chunk's archive is."""
    metadata = read_metadata(folder)
    place = next(info for index, info in metadata.storage_data.items() if index.fqn == "decoder.final_layernorm.weight")
    place.relative_path, place.offset, place.length = "__trap.distcp", 0, (folder / "__trap.distcp").write_bytes(saved(trap))
    (folder / METADATA).write_bytes(pickle.dumps(metadata))


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.saved(tiny_models.qwen3_moe(), tmp_path_factory.mktemp("hf") / "model")


@pytest.fixture(scope="module")
def dist(hf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist") / "model"
    run("mode=hf_to_dist", f"hf={hf}", f"out={folder}")
    return folder


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (in_metadata, "it names posix.system, which no checkpoint's metadata needs"),
        (in_common, "it is damaged, or holds more than tensors and plain values; nothing of it was run"),
        (in_a_tensor, "a tensor's archive names posix.system, which is none of a tensor"),
    ],
)
def test_a_trap_does_not_spring(place, message: str, hf: Path, dist: Path, tmp_path: Path, rank_pool) -> None:
    """A call in any file of the checkpoint is not made, and the load fails for that reason, with the file's name."""
    folder, mark = shutil.copytree(dist, tmp_path / "dist"), tmp_path / "sprung"
    place(folder, Touches(mark))
    (said,) = rank_pool(1).run(stock.refusal, str(hf), str(folder))
    assert not mark.exists()
    assert said.startswith(f"{folder}/")
    assert message in said
