"""``trackers=[wandb]``: Weights & Biases, with a table of samples; ``mode=offline`` writes the run folder's ``wandb/`` for ``wandb sync``.

The key comes from ``WANDB_API_KEY`` or ``wandb login``; a run that goes on is the same run there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlbatch.api import Configurable, CountOrZero, TrackerContext, TrackerSpec, hookimpl, sample_table
from rlbatch.api.values import option


@dataclass(frozen=True)
class Options:
    """Options of ``wandb``."""

    project: str = option("rlbatch", "Project.")
    entity: str = option("", "User or team; empty: your default one.")
    group: str = option("", "Group of the run; empty: none.")
    name: str = option("", "Name of the run; empty: that of the run folder.")
    tags: tuple[str, ...] = option((), "Tags of the run.")
    mode: Literal["online", "offline"] = option("online", "offline: only files, which `wandb sync` uploads later.")
    samples: CountOrZero = option(64, "Rows of a table of samples; 0: no tables.")
    samples_interval: CountOrZero = option(10, "Steps between tables; 0: none.")


class WandB:
    """The tracker that logs to Weights & Biases."""

    def __init__(self, context: TrackerContext, options: Options) -> None:
        """Opens the run."""
        import wandb

        self._wandb, self._options = wandb, options
        self._run = wandb.init(
            project=options.project,
            entity=options.entity or None,
            group=options.group or None,
            name=options.name or context.name,
            tags=list(options.tags),
            id=context.run_id,
            resume="allow" if options.mode == "online" else None,
            mode=options.mode,
            dir=str(context.run_dir),
            config=dict(context.config),
            # The process's streams are the run folder's logs, and neither its source nor its arguments are anybody's business.
            settings=wandb.Settings(console="off", silent=True, disable_git=True, save_code=False, disable_job_creation=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")  # a step may come twice, and a run that goes on does steps again

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs metrics over the step."""
        self._run.log({"step": step, **metrics})

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Logs a table every ``samples_interval`` steps."""
        options = self._options
        if options.samples and options.samples_interval and step % options.samples_interval == 0:
            columns, cells = sample_table(rows[: options.samples])
            table = self._wandb.Table(columns=columns, data=cells, allow_mixed_types=True)
            self._run.log({"step": step, "samples": table})

    def close(self, status: str) -> None:
        """Ends the run."""
        self._run.finish(exit_code=int(status == "failed"))


@hookimpl
def rlbatch_register_trackers() -> Mapping[str, Configurable]:
    """Supplies ``wandb``."""
    return {"wandb": TrackerSpec(WandB, Options, module="wandb")}
