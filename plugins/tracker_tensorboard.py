"""``trackers=[tensorboard]``: every metric of every step as a scalar, in the run folder's ``tensorboard/``.

NaN and infinity are kept, so that a broken value shows.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlbatch.api import Configurable, NoOptions, TrackerContext, TrackerSpec, hookimpl


class TensorBoard:
    """The tracker that writes TensorBoard's event files."""

    def __init__(self, context: TrackerContext, options: NoOptions) -> None:
        """Hides what earlier event files have of steps after ``context.done`` (0: of all)."""
        from torch.utils.tensorboard import SummaryWriter

        folder = context.run_dir / "tensorboard"
        purge_step = (context.done + 1 if context.done else 0) if any(folder.glob("events.*")) else None
        self._writer = SummaryWriter(str(folder), purge_step=purge_step)

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds the step's metrics; they are on disk on return, so that a killed run loses none."""
        for tag, value in metrics.items():
            self._writer.add_scalar(tag, value, step)
        self._writer.flush()

    def table(self, step: int, tag: str, markdown: str) -> None:
        """Adds a table, under Text."""
        self._writer.add_text(tag, markdown, step)
        self._writer.flush()

    def close(self, status: str) -> None:
        """Ends the event file."""
        self._writer.close()


@hookimpl
def rlbatch_register_trackers() -> Mapping[str, Configurable]:
    """Supplies ``tensorboard``."""
    return {"tensorboard": TrackerSpec(TensorBoard, NoOptions, in_step=True)}
