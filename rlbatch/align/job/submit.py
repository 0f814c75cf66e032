"""Submits a comparison as a job: reads the command line, and prepares the run folder."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from rlbatch.align.arguments import JOB_KEYS, Options
from rlbatch.api import ModelFamily
from rlbatch.api.exit_codes import FAILED
from rlbatch.config.bounded_files import read_own
from rlbatch.config.compose import CONFIG_FILE, save_config
from rlbatch.config.paths import with_absolute_paths, with_paths_there
from rlbatch.config.schema import Config, LayoutConfig
from rlbatch.config.structured import from_mapping, show_value, to_plain
from rlbatch.prepare import PLACE_CHECKS
from rlbatch.registry import Registry, compose_job
from rlbatch.run_dir import taken_run_dir
from rlbatch.start import Program, start

OPTIONS, VERDICT, TEXT, PAGE = "align.json", "verdict.json", "align.txt", "align.html"
"""Files in the run folder: the options; whether all sides agree; the text output; the HTML page."""
_OF_JOB = re.compile(rf"\+{{0,2}}({'|'.join(JOB_KEYS)})=|\+{{0,2}}(cluster|launch)\.")


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits arguments into the command's own and those of ``rlbatch.submit``, which say where and how a job runs."""
    of_job = [argument for argument in arguments if _OF_JOB.match(argument)]
    return [argument for argument in arguments if argument not in of_job], of_job


def submit(options: Options, family: ModelFamily, layouts: dict[str, LayoutConfig], of_job: Sequence[str]) -> int:
    """Starts the job, with as many ranks as the largest layout has, or hands it to Slurm.

    Returns:
        Exit code; also 1 where the job ended as it should and a side differs.

    Raises:
        RlbatchError: the job is refused.
    """
    engine = {name: with_paths_there(own) for name, own in options.engine.items()}
    options = replace(with_absolute_paths(options), engine=engine)
    largest = max(layouts.values(), key=lambda layout: layout.world_size, default=LayoutConfig(world_size=1))
    sizes = [f"layout.{name}={value}" for name, value in asdict(largest).items() if name.endswith("_size")]
    named = [f"model.name=align-{family.name}", f"model.hf={options.hf}", f"plugins={show_value(options.plugins)}"]
    # A job's config says what is trained or evaluated, and nothing is here: the least that is accepted, and no model of the cluster's own.
    fixed = [
        "mode=eval",
        "data.eval=embedded",
        f"train.precision={options.precision}",
        "plan.enforce=false",
        "trackers=[]",
        "cluster.model=",
    ]
    config, registry = compose_job([*fixed, *named, *sizes, *of_job])
    made: list[Path] = []
    code = start(config, registry, Program("rlbatch.align.job.rank", partial(_prepared, options, made.append)))
    if code == 0 and (verdict := made[0] / VERDICT).exists():
        return 0 if read_own(verdict)["agrees"] else FAILED
    return code


def asked(run_dir: Path) -> Options:
    """The options of the comparison in a run folder; raises as ``from_mapping``."""
    return from_mapping(Options, read_own(run_dir / OPTIONS))


@contextmanager
def _prepared(options: Options, tell: Callable[[Path], None], config: Config, registry: Registry) -> Iterator[tuple[Config, Path]]:
    """Context with a prepared run folder, as ``rlbatch.prepare.prepared_run`` without the parts about training."""
    with taken_run_dir(config) as run_dir:
        config = replace(config, run_dir=str(run_dir))
        for check in PLACE_CHECKS:
            check(config, registry, run_dir)
        (run_dir / VERDICT).unlink(missing_ok=True)
        save_config(config, run_dir / CONFIG_FILE)
        (run_dir / OPTIONS).write_text(json.dumps(to_plain(options)) + "\n", encoding="utf-8")
        tell(run_dir)
        yield config, run_dir
