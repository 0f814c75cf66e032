"""The trained policy as a Hugging Face folder, for engines, evaluations and other trainers."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch.distributed as dist

from rlbatch.checkpoint.hf import HfWriter
from rlbatch.pipeline.job import Job


def export_hf(job: Job) -> Path:
    """Writes ``<run_dir>/hf``: weights, and config and tokenizer of the model it began from; a collective.

    Every rank takes part in gathering, tensor by tensor; rank 0 writes. The folder appears when it is complete.
    """
    folder, draft = job.run_dir / "hf", job.run_dir / "hf.part"
    if job.rank == 0:
        shutil.rmtree(draft, ignore_errors=True)
    writer = HfWriter(draft, like=job.hf_folder) if job.rank == 0 else None
    for named in job.trainer.export():
        if writer:
            writer.write([named])
    if writer:
        writer.close()
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier life of this run
        os.replace(draft, folder)
    dist.barrier()
    return folder
