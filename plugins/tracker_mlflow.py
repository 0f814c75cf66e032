"""``trackers=[mlflow]``: an MLflow run, with a table of samples; without a server in the run folder's ``mlflow/``.

Names and passwords of a server come from ``MLFLOW_TRACKING_USERNAME`` and ``MLFLOW_TRACKING_PASSWORD``, its address from ``uri`` or
``MLFLOW_TRACKING_URI``. A run that goes on is the same run there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlbatch.api import Configurable, CountOrZero, TrackerContext, TrackerSpec, hookimpl, sample_table
from rlbatch.api.values import option

STATUS = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
MOST_CHARACTERS, MOST_AT_ONCE = 500, 100
"""What MLflow takes: most characters of a parameter's value, and most parameters in a call."""


@dataclass(frozen=True)
class Options:
    """Options of ``mlflow``."""

    uri: str = option("", "Address of the tracking server; empty: MLFLOW_TRACKING_URI, else a database in the run folder.")
    experiment: str = option("rlbatch", "Experiment, which is made if there is none.")
    name: str = option("", "Name of the run; empty: that of the run folder.")
    samples: CountOrZero = option(64, "Rows of a table of samples; 0: no tables.")
    samples_interval: CountOrZero = option(10, "Steps between tables; 0: none.")


class MLflow:
    """The tracker that logs to MLflow."""

    def __init__(self, context: TrackerContext, options: Options) -> None:
        """Opens the run, or goes on with that of this run folder."""
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param, RunTag

        self._options, self._metric = options, Metric
        folder = context.run_dir / "mlflow"
        uri = options.uri or os.environ.get("MLFLOW_TRACKING_URI", "")
        if not uri:
            folder.mkdir(exist_ok=True)
        self._client = client = MlflowClient(uri or f"sqlite:///{folder / 'mlflow.db'}")
        experiment = client.get_experiment_by_name(options.experiment)
        where = None if uri else folder.joinpath("artifacts").as_uri()
        number = experiment.experiment_id if experiment else client.create_experiment(options.experiment, artifact_location=where)
        found = client.search_runs([number], f"tags.`rlbatch.run_id` = '{context.run_id}'", max_results=1)
        if found:
            self._run = found[0].info.run_id
            client.update_run(self._run, status="RUNNING")
            return
        tags = {"rlbatch.run_id": context.run_id}
        self._run = client.create_run(number, run_name=options.name or context.name, tags=tags).info.run_id
        parameters = [Param(key, value[:MOST_CHARACTERS]) for key, value in _flat(context.config)]
        for start in range(0, len(parameters), MOST_AT_ONCE):
            client.log_batch(self._run, params=parameters[start : start + MOST_AT_ONCE])
        client.log_batch(self._run, tags=[RunTag("rlbatch.run_dir", str(context.run_dir))])

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs metrics of the step."""
        now = int(time.time() * 1000)
        self._client.log_batch(self._run, metrics=[self._metric(tag, float(value), now, step) for tag, value in metrics.items()])

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Logs a table every ``samples_interval`` steps: ``samples/step_000010.json``."""
        options = self._options
        if options.samples and options.samples_interval and step % options.samples_interval == 0:
            columns, cells = sample_table(rows[: options.samples])
            self._client.log_dict(self._run, {"columns": columns, "data": cells}, f"samples/step_{step:06d}.json")

    def close(self, status: str) -> None:
        """Ends the run."""
        self._client.set_terminated(self._run, STATUS.get(status, "FAILED"))


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)


@hookimpl
def rlbatch_register_trackers() -> Mapping[str, Configurable]:
    """Supplies ``mlflow``."""
    return {"mlflow": TrackerSpec(MLflow, Options, module="mlflow")}
