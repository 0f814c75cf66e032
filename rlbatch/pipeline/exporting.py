"""Writes the policy as a Hugging Face folder, for engines, evaluations and other trainers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from rlbatch.api import CheckpointError
from rlbatch.checkpoint.export_form import ExportForm, NamedTensor
from rlbatch.checkpoint.hf import HfTensors, HfWriter
from rlbatch.checkpoint.reading import count_not_finite
from rlbatch.config.hf_config import read_config
from rlbatch.pipeline.job import Job
from rlbatch.pipeline.loading import weights_source


def export_hf(job: Job, name: str) -> Path:
    """Writes ``<run_dir>/<name>`` with the weights, and with config and tokenizer of the model that the run began from; a collective.

    Every rank takes part in gathering the tensors, one by one. Rank 0 writes them, and then adds the tensors that are carried over from the
    source. The folder appears when it is complete.

    Raises:
        CheckpointError: on rank 0, the folder cannot be written; nothing is left of it.
    """
    folder, draft = job.run_dir / name, job.run_dir / f"{name}.part"
    if job.rank == 0:
        shutil.rmtree(draft, ignore_errors=True)  # of a killed run
        try:
            _write(job, draft)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)  # a full disk has no room for what was written either
            raise
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier attempt of this run
        os.replace(draft, folder)
    else:
        for _ in job.trainer.export():
            pass
    job.store.barrier(f"export/{name}", job.watchdog.limit_s("checkpoint"))  # rank 0 may be at it for longer than a collective waits
    return folder


def _write(job: Job, draft: Path) -> None:
    source = weights_source(job.config, job.hf_folder)
    form = ExportForm(job.family, job.config.checkpoint.export_dtype, read_config(job.hf_folder), HfTensors(source) if source else None)
    writer = HfWriter(draft, like=job.hf_folder, config=form.config())
    for name, tensor in job.trainer.export():
        writer.write(_checked(form.encode(name, tensor)))
    writer.write(_checked(form.carried()))
    writer.close()


def _checked(tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    """Passes tensors on; raises CheckpointError for a value that is not finite in the written type, which may have too small a range."""
    for name, tensor in tensors:
        if count := count_not_finite(tensor.contiguous()):
            raise CheckpointError(
                f"checkpoint.export_dtype: {name} has {count} of {tensor.numel()} values that are infinite or NaN in {tensor.dtype}. "
                "Use checkpoint.export_dtype=bf16, or correct the folder that it is carried from."
            )
        yield name, tensor
