"""The trained policy as a Hugging Face folder, for engines, evaluations and other trainers."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch.distributed as dist

from rlbatch.checkpoint.export import ExportForm
from rlbatch.checkpoint.hf import HfTensors, HfWriter
from rlbatch.config.hf_config import read_config
from rlbatch.pipeline.job import Job
from rlbatch.pipeline.loading import weights_source


def export_hf(job: Job) -> Path:
    """Writes ``<run_dir>/hf``: weights, and config and tokenizer of the model it began from; a collective.

    Every rank takes part in gathering, tensor by tensor; rank 0 writes, and then adds what is carried from the source. The folder appears
    when it is complete.
    """
    folder, draft = job.run_dir / "hf", job.run_dir / "hf.part"
    if job.rank == 0:
        _write(job, draft)
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier life of this run
        os.replace(draft, folder)
    else:
        for _ in job.trainer.export():
            pass
    dist.barrier()
    return folder


def _write(job: Job, draft: Path) -> None:
    source = weights_source(job.config, job.hf_folder)
    tensors = HfTensors(source) if source else None
    form = ExportForm(job.family, job.config.checkpoint.export_dtype, read_config(job.hf_folder), tensors)
    shutil.rmtree(draft, ignore_errors=True)
    writer = HfWriter(draft, like=job.hf_folder, config=form.config())
    for name, tensor in job.trainer.export():
        writer.write(form.encode(name, tensor))
    writer.write(form.carried())
    writer.close()
