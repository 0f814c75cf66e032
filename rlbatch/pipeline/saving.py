"""Writes the checkpoints of a run: Megatron's state, and the pipeline's (step, schedule, place in the prompts, random numbers)."""

from __future__ import annotations

import io
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlbatch.api import CheckpointError, ConfigError
from rlbatch.checkpoint import run_folder
from rlbatch.checkpoint.best import Best, restore
from rlbatch.checkpoint.identity import identity
from rlbatch.collectives import all_gather_ragged
from rlbatch.config.hf_config import read_config
from rlbatch.first_rank import on_first_rank
from rlbatch.launch.records.history import record_write
from rlbatch.launch.records.ownership import Lock, ensure_run_id
from rlbatch.megatron.checkpoint import TrainerState
from rlbatch.megatron.rng import rng_states, set_rng_states
from rlbatch.megatron.state_writer import Writing, naming, on_every_rank
from rlbatch.pipeline import checkpoint_space
from rlbatch.pipeline.job import Job
from rlbatch.pipeline.resuming import START, Resumed
from rlbatch.pipeline.waiting_groups import FILE as WAITING
from rlbatch.pipeline.waiting_groups import Waiting
from rlbatch.prompts.prompt_order import Cursor

HANDOVER_S = 5.0
"""Longest wait for a remaining rank 0 of an earlier attempt to end, seconds."""


@dataclass(frozen=True)
class Boundary:
    """The state that a step changes before its first update.

    That is the place in the prompts, the waiting groups and this rank's random numbers, from which rewards may draw.
    """

    prompt_cursor: Cursor
    random_numbers: Tensor
    waiting: Waiting

    @classmethod
    def of(cls, job: Job) -> Boundary:
        """The state of the job now."""
        return cls(job.order.cursor, rng_states(), job.waiting.copy())

    def restore(self, job: Job) -> None:
        """Restores the state, which undoes the step."""
        job.order.cursor = self.prompt_cursor
        job.waiting.restore(self.waiting)
        set_rng_states(self.random_numbers)


@dataclass
class _Pending:
    """A checkpoint whose state is being written by child processes."""

    step: int
    need: int
    progress: dict[str, Any]
    writing: Writing


class Checkpoints:
    """Saves a job after its steps, in a folder that rank 0 locks. Every method but ``abort`` is a collective.

    Args:
        job: Job to save.
        announce: Called with messages for the user.
        resumed: State that the job resumed from.

    Raises:
        RlbatchError: another run saves in the folder, or something is in the place of a checkpoint of this run.
    """

    def __init__(self, job: Job, announce: Callable[[str], None], resumed: Resumed = START) -> None:
        self._job, self._announce = job, announce
        self._saved_step, self._best = resumed.step, resumed.best
        self._root = run_folder.checkpoint_root(job.config.checkpoint.save, job.run_dir)
        self._run = ""
        self._lock: Lock | None = None
        if job.config.checkpoint.save_interval >= 0:
            self._run = on_first_rank(self._take_folder)
            self._best = resumed.best if on_first_rank(lambda: restore(self._root, resumed.best) is not None) else None
        self._identity = identity(job.config, read_config(job.hf_folder), job.prompts_identity)
        self._pending: _Pending | None = None

    def _take_folder(self) -> str:
        """Makes and locks the folder of checkpoints, on rank 0; returns the run's id."""
        run, steps = ensure_run_id(self._job.run_dir), range(self._saved_step + 1, self._job.config.train.steps + 1)
        run_folder.make_root(self._root)
        self._lock = lock = Lock(self._root)
        if not lock.try_for(HANDOVER_S):
            raise ConfigError(f"checkpoint.save={self._root}: another run is saving in it. Wait for its end, or choose another.")
        run_folder.check_places(self._root, run, steps)
        return run

    def is_best(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Whether the evaluation after a step is the best so far, so that its checkpoint is kept; the same on every rank.

        Args:
            step: Last step done; 0 if there is none, which cannot be saved.
            metrics: Metrics of the evaluation; empty if there was none.
        """
        metric = self._job.config.checkpoint.best
        if not step or metric not in metrics or (self._best and metrics[metric] <= self._best.value):
            return False
        self._best = best = Best(metric, metrics[metric], step)
        if step == self._saved_step and self._job.rank == 0:  # the attempt that saved it had no time to evaluate
            best.name(self._root)
        return True

    def after_step(self, step: int, *, is_due: bool, is_followed_up: bool = True) -> float | None:
        """Completes a checkpoint that was written in the meantime, and saves this step if due.

        Args:
            step: Last step done.
            is_due: Whether to save the step.
            is_followed_up: Whether its evaluation and export are done; else they are left to the attempt that resumes from it.

        Returns:
            Seconds for which training waited; None if there was nothing to do.

        Raises:
            CheckpointError: a checkpoint cannot be written; the previous one stays the latest.
        """
        started, before = time.perf_counter(), self._pending
        if before and (is_due or before.writing.is_done()):
            self.close()
        if is_due:
            self.save(step, is_followed_up=is_followed_up)
        return time.perf_counter() - started if is_due or self._pending is not before else None

    def before_end(self, step: int, *, is_followed_up: bool = True) -> None:
        """Saves the state after ``step`` before the job ends early, unless its checkpoint exists; complete on return."""
        if step != self._saved_step:
            self.save(step, is_followed_up=is_followed_up)
        self.close()

    def save(self, step: int, *, is_followed_up: bool = True) -> None:
        """Saves the state after ``step``: complete on return, or with ``checkpoint.async_save`` once it is written and ``close`` ran."""
        self.close()
        if not self._job.trainer.policy_version:  # the optimizer has no state yet, which Megatron does not save
            self._announce(f"step {step}: no update was made so far, nothing is saved")
            self._saved_step = step
            return
        started = time.perf_counter()
        self._job.trainer.release_gradients()  # nothing needs them any more, and writing takes some memory
        state, beside = TrainerState(self._job.trainer), self._beside()
        total = torch.tensor(state.write_bytes + sum(map(len, beside.values())))
        dist.all_reduce(total)
        need = int(total)
        with self._removing(run_folder.draft_folder(self._root, step)):
            draft = self._on_first_rank(lambda: run_folder.begin(self._root, step), need, step)
            checkpoint_space.check_disk(self._root, need, step)
            is_later = self._may_write_later(step, state.write_bytes + state.buffer_bytes)
            if not is_later:
                checkpoint_space.check_memory(self._root, state.buffer_bytes, step)
            progress = self._progress(step) | {"is_followed_up": is_followed_up}
            with checkpoint_space.explaining_write_errors(self._root, need, step):
                on_every_rank(lambda: _write(draft, beside))
                if is_later:
                    self._pending = _Pending(step, need, progress, state.start_writing(draft / run_folder.STATE))
                else:
                    state.write(draft / run_folder.STATE)
            if not is_later:
                self._complete(step, need, progress)
                self._measure(need, time.perf_counter() - started)
        self._saved_step = step

    def close(self) -> None:
        """Waits for the checkpoint that is being written, and makes it the latest."""
        pending = self._pending
        if pending:
            with self._removing(run_folder.draft_folder(self._root, pending.step)):
                with checkpoint_space.explaining_write_errors(self._root, pending.need, pending.step):
                    pending.writing.finish()
                self._complete(pending.step, pending.need, pending.progress)
            self._pending = None

    def abort(self) -> None:
        """Drops the checkpoint that is being written, on this rank, and unlocks the folder."""
        pending, self._pending = self._pending, None
        if pending:
            pending.writing.abort()
        if self._lock:
            self._lock.release()
            self._lock = None

    def _may_write_later(self, step: int, own_bytes: int) -> bool:
        if not self._job.config.checkpoint.async_save:
            return False
        reason = checkpoint_space.host_without_room(own_bytes)
        if reason:
            self._announce(
                f"checkpoint.async_save=true: refused at step {step}: the copy {reason}. This checkpoint is written while training waits."
            )
        return not reason

    @contextmanager
    def _removing(self, draft: Path) -> Iterator[None]:
        """Removes the draft of a failed save, to free the disk."""
        try:
            yield
        except CheckpointError:
            if self._job.rank == 0:
                shutil.rmtree(draft, ignore_errors=True)
            raise

    def _complete(self, step: int, need: int, progress: dict[str, Any]) -> None:
        keep = self._job.config.checkpoint.keep
        self._on_first_rank(lambda: run_folder.complete(self._root, step, progress, self._run, keep), need, step)

    def _on_first_rank(self, work: Callable[[], Path], need: int, step: int) -> Path:
        def explained() -> Path:
            with checkpoint_space.explaining_write_errors(self._root, need, step):
                return work()

        return on_first_rank(explained)

    def _measure(self, num_bytes: int, seconds: float) -> None:
        self._job.stopping.pace.save_s = seconds
        if self._job.rank == 0:
            record_write(self._job.run_dir, num_bytes, seconds)

    def _beside(self) -> dict[str, bytes]:
        """Files that this rank writes beside the trainer's state: name -> content."""
        files, ranks = {}, all_gather_ragged(rng_states())
        if self._job.rank == 0:
            saved = io.BytesIO()
            torch.save([states.clone() for states in ranks], saved)
            files[run_folder.RNG] = saved.getvalue()
        if waiting := self._job.waiting.to_bytes():
            files[WAITING.format(rank=self._job.rank)] = waiting
        return files

    def _progress(self, step: int) -> dict[str, Any]:
        job = self._job
        return {
            "step": step,
            "policy_version": job.trainer.policy_version,
            "schedule_steps": job.trainer.schedule.num_steps,
            "prompt_cursor": list(job.order.cursor),
            "signal": job.health.state(),
            "waiting": job.waiting.counts(),
            "best": asdict(self._best) if self._best else None,
            **self._identity,
        }


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes files and syncs each to disk, as rank 0 might wait only for its own host's."""
    for name, content in files.items():
        with naming(name):
            (folder / name).write_bytes(content)
            run_folder.sync(folder / name)
