"""Checkpoints on real ranks: what a resumed job has, under its own layout and others; what is refused; what a failed save leaves."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rlbatch.checkpoint.run_folder import LATEST, PROGRESS, STATE
from rlbatch.config.keys import EMBEDDED
from tests.leftovers import no_memory_left
from tests.pipeline import saving
from tests.pipeline.saving import saving_to
from tests.pipeline.steps import merged, prepared, small_config
from tests.small_disk import small_file_system

TOLERANCE = 1e-5
FAST = (
    "train.prompts_per_step=4",
    "algorithm.group_size=2",
    "optimizer.lr_schedule=linear",
    "optimizer.lr=2e-3",
    "optimizer.weight_decay=0.1",
)
WAITING = ("sampling.oversampling=4", "sampling.filters=[length]", "sampling.partial_tokens=4", "rollout.max_response_tokens=16")
"""Groups wait for the next step, finished and not."""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("run"))


def world_size(layout: str) -> int:
    return 1 if layout == "1 rank" else 2


def config_for(layout: str, *overrides: str):
    return small_config(layout, *FAST, *overrides)


@pytest.mark.parametrize(
    ("layout", "overrides"),
    [
        ("ep2", ()),
        ("ep2", ("train.updates_per_step=1", "train.epochs=2", "algorithm=icepop")),
        ("tp2 ep2", ()),
        ("ep2", WAITING),
        ("ep2", ("train.precision=bf16", "rollout.max_logprob_diff=null", "offload=optimizer_state", "offload.options.weights=true")),
    ],
)
def test_a_resumed_job_is_the_one_that_went_on(layout: str, overrides: tuple[str, ...], run_dir: Path, tmp_path: Path, rank_pool) -> None:
    """N+M steps equal N steps, save, a new job, resume, M steps, bitwise: weights, main weights, moments, step counts, learning rate,
    random numbers, place in the prompts, groups that wait; samples, advantages and metrics. Both chained optimizers have moments.
    """
    config = saving_to(config_for(layout, *overrides), tmp_path)
    for rank in rank_pool(2).run(saving.continued, config, str(run_dir), 2, 2):
        assert rank.after_load == []
        assert rank.at_end == []
        assert len(rank.num_moments) == 2
        assert all(rank.num_moments)
        assert rank.adam_steps == [8.0]  # 4 steps of 2 updates
        assert rank.same_samples
        assert rank.metrics[0] == rank.metrics[1]
        assert len(rank.metrics[0][0]) > 10


def test_the_comparison_sees_an_optimizer_that_was_not_restored(run_dir: Path, tmp_path: Path, rank_pool) -> None:
    """If loading skips the optimizer, moments and step counts of every chained optimizer differ, and so do the weights at the end."""
    config = saving_to(config_for("ep2"), tmp_path)
    for rank in rank_pool(2).run(saving.continued, config, str(run_dir), 1, 1, True):
        for chain in range(2):
            names = [name for name in rank.after_load if name.startswith(f"chain {chain} ")]
            assert any(name.endswith(" exp_avg") for name in names)
            assert any(name.endswith(" step") for name in names)
        assert any(name.startswith("weight ") for name in rank.at_end)


@pytest.fixture(scope="module")
def saved(run_dir: Path, tmp_path_factory: pytest.TempPathFactory, rank_pool):
    """Checkpoints after two steps, by layout, each with the step after it."""
    made = {}

    def under(layout: str, overrides: tuple[str, ...] = ()):
        if (layout, overrides) not in made:
            root = tmp_path_factory.mktemp("saved")
            config = saving_to(config_for(layout, *overrides), root)
            made[layout, overrides] = root, rank_pool(world_size(layout)).run(saving.save_after, config, str(run_dir), 2)
        return made[layout, overrides]

    return under


@pytest.mark.parametrize(
    ("source", "target", "overrides"),
    [
        ("ep2", "1 rank", WAITING),
        ("ep2", "pp2", ()),
        pytest.param("ep2", "tp2", (), marks=pytest.mark.long("jobs", "models")),
        ("dp2", "ep2", ()),
    ],
)
def test_another_layout_takes_the_same_step(source: str, target: str, overrides: tuple[str, ...], saved, run_dir: Path, rank_pool) -> None:
    """Weights are bitwise those that were saved; the next step has the same samples, also of groups that waited on two ranks, and loss,
    gradient norm and updated weights within 1e-5: moments and step counts were resharded. The change is announced.
    """
    root, ranks = saved(source, overrides)
    before, steps, after = ranks[0]
    assert len(list((root / "step_000002").glob("waiting_*"))) == (2 if overrides else 0)
    resumed = rank_pool(world_size(target)).run(saving.resumed, saving_to(config_for(target, *overrides), root), str(run_dir), 2)
    assert saving.different(resumed[0][0], before) == []
    assert merged([rank[1].samples[0] for rank in resumed]) == merged([rank[1].samples[0] for rank in ranks])
    [want] = saving.measured(steps)
    for _, taken, weights, told in resumed:
        [got] = saving.measured(taken)
        assert {name: got[name] for name in want} == pytest.approx(want, rel=TOLERANCE, abs=TOLERANCE)
        for name, tensor in weights.items():
            assert float((tensor - after[name]).norm() / after[name].norm()) <= TOLERANCE, name
        assert max(float((after[name] - before[name]).norm() / before[name].norm()) for name in after) > 100 * TOLERANCE
        [line] = told
        assert line.startswith("layout changed: layout.")
        assert " was " in line


def test_other_runs_are_refused_with_what_changed(saved, run_dir: Path, tmp_path: Path, rank_pool) -> None:
    """Model, prompts, seed and precision: all differences at once, with the old and the new value, on every rank."""
    root, _ = saved("ep2")
    progress = root / "step_000002" / PROGRESS
    original = progress.read_text()
    progress.write_text(json.dumps({**json.loads(original), "model": {**json.loads(original)["model"], "hidden_size": 32}}))
    rows = (run_dir / EMBEDDED / "train.jsonl").read_text().splitlines()
    prompts = tmp_path / "train.jsonl"
    prompts.write_text("\n".join(rows[1:]) + "\n")
    config = config_for("ep2", "seed=1", f"data.train={prompts}", "train.precision=bf16")
    try:
        messages = rank_pool(2).run(saving.refusal, saving_to(config, root), str(run_dir))
    finally:
        progress.write_text(original)
    assert messages[0] == messages[1]
    assert messages[0].startswith(f"ConfigError: resume=auto: {root / 'step_000002'} is of another run: ")
    for change in (
        "model hidden_size was 32, is 64",
        f"data.train prompts was {len(rows)}, is {len(rows) - 1}",
        "data.train sha256 was ",
        "seed was 0, is 1",
        "train.precision was fp32, is bf16",
    ):
        assert change in messages[0]


def test_checkpoints_of_another_run_are_not_mixed_in(saved, run_dir: Path, rank_pool) -> None:
    """A run that is not to be resumed does not save among another's checkpoints, of which it would delete the oldest."""
    root, _ = saved("ep2")
    config = replace(saving_to(config_for("ep2"), root), resume="never")
    assert rank_pool(2).run(saving.refusal, config, str(run_dir))[1].startswith(f"ConfigError: checkpoint.save={root}: has checkpoints of")


def flip(root: Path) -> None:
    for path in (root / "step_000002" / STATE).glob("*.distcp"):
        path.write_bytes(bytes(path.stat().st_size))


def test_a_damaged_state_is_named(saved, run_dir: Path, tmp_path: Path, rank_pool) -> None:
    """Truncated: the file, with both sizes. Overwritten, the sizes being right: the file."""
    root, _ = saved("ep2")
    copy = tmp_path / "checkpoints"
    subprocess.run(["cp", "-r", str(root), str(copy)], check=True)
    config = saving_to(config_for("ep2"), copy)
    state = copy / "step_000002" / STATE
    [overwritten, _] = rank_pool(2).run(saving.corrupted, config, str(run_dir), flip)
    assert overwritten.startswith(f"DataError: {state}/__")
    assert ".distcp: was changed after it was written" in overwritten
    os.truncate(state / "__0_0.distcp", 100)
    [truncated, _] = rank_pool(2).run(saving.refusal, config, str(run_dir))
    assert truncated.startswith(f"DataError: {state / '__0_0.distcp'}: has 100 bytes, ")


def test_weights_start_from_a_checkpoint(saved, run_dir: Path, tmp_path: Path, rank_pool) -> None:
    """checkpoint.load takes a checkpoint's weights and nothing else, under any layout, beside a reference model that is another's;
    checkpoint.ref_load takes one too.
    """
    root, ranks = saved("ep2")
    folder = root / "step_000002"
    config = saving_to(config_for("pp2", "algorithm.kl_loss=true"), tmp_path, load=str(folder))
    [policy, reference, state] = rank_pool(2).run(saving.started, config, str(run_dir))[0]
    assert saving.different(policy, ranks[0][0]) == []
    assert saving.different(reference, policy) != []
    assert state == (0, 0, (0, 0), 0)
    config = saving_to(config_for("pp2", "algorithm.kl_loss=true"), tmp_path, load=str(run_dir / EMBEDDED / "model"), ref_load=str(folder))
    [swapped_policy, swapped_reference, _] = rank_pool(2).run(saving.started, config, str(run_dir))[0]
    assert saving.different(swapped_policy, reference) == []
    assert saving.different(swapped_reference, policy) == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "",
            "is neither a checkpoint (progress.json) nor a Hugging Face folder (*.safetensors). Name one of its checkpoints: step_000002.",
        ),
        ("nowhere", "is neither a checkpoint (progress.json) nor a Hugging Face folder (*.safetensors). Correct the path."),
    ],
)
def test_folders_without_weights_are_refused(name: str, message: str, saved, run_dir: Path, tmp_path: Path, rank_pool) -> None:
    """With what the folder lacks, and the checkpoints in it."""
    folder = saved("ep2")[0] / name if name else saved("ep2")[0]
    config = saving_to(config_for("ep2"), tmp_path, load=str(folder))
    assert rank_pool(2).run(saving.refusal, config, str(run_dir)) == [f"DataError: checkpoint.load={folder}: {message}"] * 2


@pytest.mark.parametrize("is_async", [False, pytest.param(True, marks=pytest.mark.long("jobs"))])
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("little space", ("the checkpoint of step 2 needs 2.", " MiB, 1.0 MiB are free.")),
        ("little space for what waits", ("the checkpoint of step 2 needs 14.", " MiB, 1.0 MiB are free.")),
        (
            "no draft",
            ("the checkpoint of step 2 could not be written (File exists). The previous checkpoint stays the latest. Look at that disk",),
        ),
        (
            "full on the way",
            ("the checkpoint of step 2 could not be written (rank 0: __0_0.distcp: File too large; rank 1: ", "`ulimit -f`"),
        ),
    ],
)
def test_a_failed_save_keeps_the_previous(
    how: str, words: tuple[str, ...], is_async: bool, run_dir: Path, tmp_path: Path, rank_pool
) -> None:
    """Without room on the disk, before or while writing: an error on every rank with path, what was met and what to do about it; the
    previous checkpoint is the latest, and what was written is gone.
    """
    config = saving_to(config_for("ep2"), tmp_path, async_save=is_async)
    for message, latest in rank_pool(2).run(saving.failing_save, config, str(run_dir), how):
        assert message.startswith(f"CheckpointError: checkpoint.save={tmp_path}: ")
        assert all(word in message for word in words), message
        assert latest == "step_000001"
    assert sorted(path.name for path in tmp_path.iterdir()) == [LATEST, "step_000001"]


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB: one checkpoint fits, a second does not."""
    with small_file_system(tmp_path / "disk", "size=3m") as folder:
        yield folder


if os.geteuid() == 0:

    @pytest.mark.parametrize("is_async", [False, True])
    def test_a_full_disk(is_async: bool, full_disk: Path, run_dir: Path, rank_pool) -> None:
        """A real file system that becomes full in the middle of a save (only root may mount one)."""
        config = saving_to(config_for("ep2"), full_disk / "root", async_save=is_async)
        for message, latest in rank_pool(2).run(saving.failing_save, config, str(run_dir), "tmpfs full on the way"):
            assert f"checkpoint.save={full_disk / 'root'}: the checkpoint of step 2 could not be written (rank " in message
            assert re.search(r"It needs 2\.\d MiB, \d+\.\d KiB are free\.", message), message
            assert latest == "step_000001"
        assert sorted(path.name for path in (full_disk / "root").iterdir()) == [LATEST, "step_000001"]


def test_an_asynchronous_save_is_of_its_moment(run_dir: Path, tmp_path: Path, rank_pool) -> None:
    """Training goes on while it is written, and what is resumed is bitwise the state when it was taken; latest.json appears when all is
    written; no process and nothing in shared memory is left. Gradients come and go meanwhile.
    """
    config = saving_to(config_for("ep2", "offload=gradients"), tmp_path, async_save=True)
    with no_memory_left():
        ranks = rank_pool(2).run(saving.asynchronous, config, str(run_dir), None)
    for rank in ranks:
        assert not rank.latest_while_writing
        assert rank.moved_meanwhile
        assert rank.differs_after_resume == []
        assert rank.told == []
        assert rank.children == 0


def test_an_asynchronous_save_needs_memory(run_dir: Path, tmp_path: Path, rank_pool) -> None:
    """Where the host has no room for the copies of its ranks, training waits for this checkpoint, and says why."""
    config = saving_to(config_for("ep2"), tmp_path, async_save=True)
    for rank in rank_pool(2).run(saving.asynchronous, config, str(run_dir), 49 * 2**20):
        assert rank.latest_while_writing
        [line] = rank.told
        assert line.startswith("checkpoint.async_save=true: refused at step 1: the copy needs 50.")
        assert " MiB of memory on host " in line
        assert "49.0 MiB are available" in line
        assert rank.differs_after_resume == []


def test_a_save_needs_memory(run_dir: Path, tmp_path: Path, rank_pool) -> None:
    """Less than its buffers: it is refused on every rank before anything is written, with both numbers, and leaves nothing."""
    for message in rank_pool(2).run(saving.save_without_memory, saving_to(config_for("ep2"), tmp_path), str(run_dir), 2**20):
        assert message.startswith(f"CheckpointError: checkpoint.save={tmp_path}: writing the checkpoint of step 1 needs 48.")
        assert " MiB of memory on host " in message
        assert "1.0 MiB are available. No checkpoint was saved before it. " in message
    assert list(tmp_path.iterdir()) == []
