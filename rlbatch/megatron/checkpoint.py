"""Saves and loads model and optimizer as a torch_dist checkpoint, in parts: every rank writes what it has, and reads what it needs."""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlbatch.api import DataError
from rlbatch.checkpoint.reading import Reading
from rlbatch.checkpoint.torch_dist import COMMON, TorchDist
from rlbatch.collectives import gathered
from rlbatch.megatron.checkpoint_chunks import ParameterChunk, placed_chunks
from rlbatch.megatron.held_parts import Part, divided, runs, weights, written
from rlbatch.megatron.policy import Policy
from rlbatch.megatron.state_writer import Writing, buffer_bytes, plan, write_bytes
from rlbatch.megatron.trainer import Trainer
from rlbatch.weights.codec import CHUNK_BYTES
from rlbatch.weights.filling import Threads


class TrainerState:
    """Weights, main weights, moments and step counts of a trainer, ready to be written from the memory that they are in.

    Attributes:
        write_bytes: Bytes that this rank will write.
        buffer_bytes: Bytes of host memory that this rank takes while it writes.
    """

    def __init__(self, trainer: Trainer) -> None:
        trainer.settle()
        self._planned = plan(written(trainer.stages, trainer.optimizer.chained_optimizers), dist.get_rank())
        self._steps = max(map(_steps_of, trainer.optimizer.chained_optimizers), default=0)
        self.write_bytes, self.buffer_bytes = write_bytes(self._planned), buffer_bytes(self._planned)

    def write(self, folder: Path) -> None:
        """Writes the state, and returns when every rank has written; a collective.

        Args:
            folder: Existing empty folder that all ranks see.

        Raises:
            CheckpointError: a rank could not write; raised on every rank.
        """
        Writing(folder, self._planned, self._steps).run_here()

    def start_writing(self, folder: Path) -> Writing:
        """Starts a child process on each rank that writes the state as it is now; a collective."""
        writing = Writing(folder, self._planned, self._steps)
        writing.start()
        return writing


def load_state(trainer: Trainer, folder: Path) -> None:
    """Loads a state of ``TrainerState``, or Megatron's ``fully_reshardable`` format, under any layout; a collective.

    Learning rate, weight decay and betas stay those of the config; the schedule sets the rate anew.

    Args:
        trainer: Trainer whose state is replaced.
        folder: Folder of a checkpoint's state.

    Raises:
        DataError: the state cannot be read, or has values that are infinite or NaN.
    """
    trainer.settle()
    with _reading(folder) as (stored, threads):
        steps = _stored_steps(folder)
        optimizers = [one for one in trainer.optimizer.chained_optimizers if any(group["params"] for group in one.param_groups)]
        for optimizer in optimizers:
            _make_state(optimizer, steps)
        _fill(stored, threads, weights(trainer.stages))
        chunks: defaultdict[int, list[ParameterChunk]] = defaultdict(list)
        for stage in trainer.stages:
            for tensor, chunk, _ in placed_chunks(stage):
                chunks[id(tensor)].append(chunk)
        for optimizer in optimizers:
            _fill_state(stored, threads, optimizer, chunks)
    if broken := trainer.not_finite(with_optimizer=True):
        raise DataError(f"{folder}: has what is infinite or NaN: {broken}. Name an earlier checkpoint in latest.json.")


def load_weights(trainer: Policy, folder: Path) -> None:
    """Loads the weights alone; a collective.

    Args:
        trainer: Policy whose weights are replaced.
        folder: Folder of a checkpoint's state, as in ``load_state``.

    Raises:
        DataError: the state cannot be read.
    """
    with _reading(folder) as (stored, threads):
        _fill(stored, threads, weights(trainer.stages))
    trainer.weights_changed()


@contextmanager
def _reading(folder: Path) -> Iterator[tuple[TorchDist, Threads]]:
    """Context with an open checkpoint and threads that read it. If one rank cannot read, every rank raises DataError."""
    failure = ""
    try:
        with TorchDist(folder, Reading(once=True)) as stored, Threads() as threads, torch.no_grad():
            yield stored, threads
    except DataError as error:
        failure = str(error)
    if found := next(filter(None, gathered(failure)), ""):
        raise DataError(found)


def _fill(stored: TorchDist, threads: Threads, parts: Iterable[Part]) -> None:
    for _ in threads.run(_filling(stored, parts)):
        pass


def _filling(stored: TorchDist, parts: Iterable[Part]) -> Iterator[Callable[[], object]]:
    """Yields a call for each piece of a part, which reads the piece into the part's memory."""
    shapes = stored.shapes()
    for part in parts:
        found, values = shapes.get(part.key, part.shape), part.values
        if found[1:] != part.shape[1:] or (found[0] != part.shape[0] and not part.is_padded):
            sizes = f"has shape {list(found)}, this model's has {list(part.shape)}"
            raise DataError(f"{stored.folder}: {part.key} {sizes}. Name a checkpoint of this model.")
        rows = min(len(values), max(0, found[0] - part.start[0]))
        values[rows:].zero_()
        for first, size in divided(((0,) * values.dim(), (rows, *values.shape[1:])), values.itemsize, CHUNK_BYTES):
            place = [at + start for at, start in zip(first, part.start, strict=True)]
            target = values[tuple(slice(at, at + length) for at, length in zip(first, size, strict=True))]
            yield partial(stored.read_into, target, part.key, place)


def _fill_state(stored: TorchDist, threads: Threads, optimizer: Any, chunks: dict[int, list[ParameterChunk]]) -> None:
    for run in runs(optimizer):
        for chunk in chunks[id(run.param)]:
            _fill(stored, threads, run.parts(chunk))
        optimizer._set_main_param_and_optimizer_states(run.param, run.state)  # of what is not kept as it is given
    if hasattr(optimizer.optimizer, "_sync_hdo_state_to_sub_optimizers"):
        optimizer.optimizer._sync_hdo_state_to_sub_optimizers()


def _make_state(optimizer: Any, steps: int) -> None:
    """Gives an optimizer that has made no step its moments, still unset, and its step count."""
    inner = optimizer.optimizer
    if hasattr(inner, "initialize_state"):  # Transformer Engine's; its load_state_dict would hold all moments twice
        optimizer.init_state_fn(inner)
        for group in inner.param_groups:
            group["step"] = steps
        return
    if hasattr(inner, "sub_optimizers"):  # else Megatron makes the moments itself, without a step, which takes memory
        optimizer._init_optimizer_states_with_dummy_values()
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict({"optimizer": {"param_groups": [{**group, "step": steps} for group in groups]}})
    for state in inner.state.values():
        if torch.is_tensor(state.get("step")):
            # Megatron gives all parameters one tensor, which every parameter's update would then count up.
            state["step"] = state["step"].clone()


def _steps_of(optimizer: Any) -> int:
    """Step count of an optimizer, kept by parameter (torch) or group (Transformer Engine); a group may also have the resumed one."""
    held = [*optimizer.optimizer.state.values(), *optimizer.param_groups]
    return max((int(one["step"]) for one in held if "step" in one), default=0)


def _stored_steps(folder: Path) -> int:
    """Step count in a checkpoint, equal for all optimizers. Megatron writes it for every group, and 0 for groups without parameters."""
    path = folder / COMMON
    try:
        common = torch.load(path, weights_only=True)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if isinstance(error, pickle.UnpicklingError):  # torch goes on to advise how to run it
            text = "it is damaged, or holds more than tensors and plain values; nothing of it was run"
        raise DataError(f"{path}: cannot be read ({text}). Name another checkpoint in latest.json, or restore the file.") from error
    if not (steps := list(_found_steps(common.get("optimizer") if isinstance(common, dict) else None))):
        raise DataError(f"{folder}: has weights, and no state of an optimizer. Name a run's checkpoint.")
    return max(steps)


def _found_steps(value: Any) -> Iterator[int]:
    if isinstance(value, dict) and "step" in value:
        yield int(value["step"])
    elif isinstance(value, (dict, list)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _found_steps(part)
