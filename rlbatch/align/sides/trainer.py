"""The trainer as a side, under a layout: one process for each rank, which writes its values to disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from rlbatch.align.values.places import Batch, Place, Trace
from rlbatch.align.values.stored import FolderWeights, Stored, write
from rlbatch.checkpoint.hf import HfTensors
from rlbatch.config.schema import LayoutConfig
from rlbatch.config.structured import from_mapping
from rlbatch.megatron.passing_values import PassingValues
from rlbatch.pipeline.bare_trainer import backward, build_trainer
from rlbatch.pipeline.packing import (
    build_microbatches,
    pad_with_dummies,
    sequence_multiple,
    split_by_sample,
    with_advantages,
)
from rlbatch.plan.layout import microbatch_count


@dataclass(frozen=True)
class Task:
    """The computation that the ranks of a layout perform, and where they write results. ``asdict`` makes it JSON.

    Attributes:
        folder: Hugging Face folder of the model.
        layout: Layout of the ranks.
        precision: ``fp32`` or ``bf16``.
        plugins: Plugins, as for ``rlbatch.submit``.
        spec: ``train.spec``.
        with_gradients: Whether to compute gradients too.
        sequences: Token ids of each sequence.
        values: Folder of a ``Stored`` for the value at each place.
        weights: Folder of a ``Stored`` for weights that differ from the model's folder.
        gradients: Folder of a ``Stored`` for gradients.
    """

    folder: str
    layout: LayoutConfig
    precision: str
    plugins: tuple[str, ...]
    spec: Literal["local", "transformer_engine"] = "local"
    with_gradients: bool = False
    sequences: list[list[int]] = field(default_factory=list)
    values: str = ""
    weights: str = ""
    gradients: str = ""

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Task:
        """The task that ``asdict`` and JSON made ``said`` of."""
        return cls(**{**said, "layout": from_mapping(LayoutConfig, said["layout"]), "plugins": tuple(said["plugins"])})


@dataclass
class Written:
    """The names of what one rank wrote.

    Attributes:
        places: Places in its own layers, if it is the first rank that has them.
        weights: Checkpoint name -> whether the weight differs from the folder's and was written; only on rank 0.
        gradients: Checkpoint names of gradients; only on rank 0.
    """

    places: list[Place] = field(default_factory=list)
    weights: dict[str, bool] = field(default_factory=dict)
    gradients: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Written:
        """The result that a rank reported in JSON."""
        return cls([(layer, name) for layer, name in said["places"]], said["weights"], said["gradients"])


@dataclass
class TrainerSide:
    """The trainer's model under a layout.

    Attributes:
        name: Name of the layout.
        task: Task without sequences and folders to write to.
        run: Lets the ranks of a layout compute a task, and returns what each of them wrote.
        scratch: Folder that all ranks see, for the values; None: a temporary folder.
    """

    name: str
    task: Task
    run: Callable[[Task], list[Written]]
    scratch: Path | None = None

    def __post_init__(self) -> None:
        self.precision = self.task.precision
        self.title = f"trainer {self.name} {self.precision}"

    def compute(self, batch: Batch) -> Trace:
        """Computes the batch under the layout; see ``Side``."""
        values, weights, gradients = Stored[Place](self.scratch), Stored[str](self.scratch), Stored[str](self.scratch)
        task = replace(self.task, sequences=[sequence.tolist() for sequence in batch.sequences])
        task = replace(task, values=str(values.folder), weights=str(weights.folder), gradients=str(gradients.folder))
        ranks = self.run(task)
        for rank in ranks:
            values.add(rank.places)
        weights.add(name for name, is_other in ranks[0].weights.items() if is_other)
        gradients.add(ranks[0].gradients)
        same = {name: name for name, is_other in ranks[0].weights.items() if not is_other}
        return Trace(values, FolderWeights(Path(task.folder), same, None, weights), gradients)


def compute(task: Task, change: Callable[[Any], None] | None = None) -> Written:
    """Computes a task on one rank, which has its part of the model, and writes the values there.

    Rank 0 writes gradients, and the weights that differ from the folder's, one tensor at a time. Every data-parallel rank computes the
    whole batch, in one pack.
    """
    layout, sequences = task.layout, [torch.tensor(each) for each in task.sequences]
    trainer = build_trainer(Path(task.folder), layout, task.plugins, precision=task.precision, spec=task.spec)
    if change is not None:
        change(trainer)
    multiple = sequence_multiple(layout.tp_size, layout.cp_size)
    ones, zeros = [torch.ones(len(each)) for each in sequences], [torch.zeros(len(each)) for each in sequences]
    packs = build_microbatches(sequences, ones, zeros, max_tokens=2**40, pad_multiple=multiple)
    packs = with_advantages(pad_with_dummies(packs, microbatch_count(layout, 1), multiple), [each + 1.0 for each in zeros])
    passing, done = PassingValues(trainer.stages, trainer.megatron_config.num_layers), Written()
    trainer.logprobs([pack.microbatch for pack in packs])
    for place, rows in passing.whole(packs[0].microbatch):
        if passing.is_first:
            for own, values in _as_compared(place, torch.cat(split_by_sample(packs[:1], [rows])), sequences):
                write(Path(task.values), own, values)
                done.places.append(own)
    source = HfTensors(Path(task.folder))
    known = set(source.names())
    for name, tensor in trainer.export():
        if dist.get_rank() == 0:
            done.weights[name] = name not in known or not _is_same(tensor, source.read(name))
            if done.weights[name]:
                write(Path(task.weights), name, tensor)
    if task.with_gradients:
        backward(trainer, packs, "token_mean")
        for name, gradient in trainer.export_gradients():
            if dist.get_rank() == 0:
                write(Path(task.gradients), name, gradient)
                done.gradients.append(name)
    return done


def _as_compared(place: Place, rows: Tensor, sequences: list[Tensor]) -> Iterator[tuple[Place, Tensor]]:
    """Yields a place as sides compare it. A prediction becomes log-probs and entropy, with 0 at a sequence's first token."""
    if place[1] != "prediction":
        yield place, rows
        return
    starts = torch.cat([torch.arange(len(each)) for each in sequences]) == 0
    for name, column in zip(("logprobs", "entropy"), rows.masked_fill(starts[:, None], 0.0).unbind(1), strict=True):
        yield (place[0], name), column


def _is_same(ours: Tensor, theirs: Tensor) -> bool:
    """Whether all values are equal, whatever the dtypes."""
    dtype = torch.promote_types(ours.dtype, theirs.dtype)
    return torch.equal(ours.cpu().to(dtype), theirs.to(dtype))
