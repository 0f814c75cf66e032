"""The command ``python -m rlbatch.submit``: composes a job, checks all that can be checked before it starts, and starts it.

Runs on a login node: imports no torch.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from textwrap import fill

from rlbatch.api import PluginError, RlbatchError
from rlbatch.api.exit_codes import REFUSED
from rlbatch.config.choices import AUTO, choice_values
from rlbatch.config.keys import EMBEDDED
from rlbatch.config.overrides import text_value
from rlbatch.config.schema import Config
from rlbatch.config.sources import group_files
from rlbatch.config.structured import KeyDoc, key_docs, show_value
from rlbatch.dry_run import show
from rlbatch.launch.records.streams import end_with_reader, exit_code_of_display, keep_output
from rlbatch.registry import compose_job, load_plugins
from rlbatch.start import start

HELP_COLUMNS = 140

INTRODUCTION = """\
Trains a mixture-of-experts language model by reinforcement learning, as one job of one process per rank: here, by Slurm or by mpirun.

Usage: python -m rlbatch.submit [key=value ...]

Without arguments: the embedded run, a tiny random model that learns a small task on this machine, CPU only, in minutes.

Examples:
  python -m rlbatch.submit
  python -m rlbatch.submit train.steps=20 seed=1 run_dir=runs/first
  python -m rlbatch.submit plugins=[examples/reward_plugin.py] reward=contains_label
  python -m rlbatch.submit +cluster=h20x96 rollout.engine.python=/shared/vllm/bin/python dry_run=true
  python -m rlbatch.submit +cluster=h20x32 model=qwen3_30b rollout.engine.python=/shared/vllm/bin/python cluster.partition=gpu follow=true
  python -m rlbatch.submit cluster_dir=~/clusters +cluster=mine model=qwen3_30b dry_run=true
  python -m rlbatch.submit launcher=mpi cluster.hostfile=hosts.txt layout.world_size=16
  python -m rlbatch.submit model.hf=/models/Qwen3-30B-A3B data.train=train.jsonl reward=number layout.world_size=8 layout.ep_size=8

The run folder is runs/<date>-<time> (or run_dir): config.yaml, TensorBoard events, samples/, summary.json, logs/, checkpoints/.
Exit codes: 0 done (launcher=slurm: submitted, or with follow=true the job's own), 1 a rank failed, 2 refused before anything started,
75 asked to stop: saved, to go on later, 130 Ctrl-C, 129, 138, 140, 143 a signal before there was anything to save.
See also: python -m rlbatch.data (what a job would train on), python -m rlbatch.jobs (batch jobs),
python -m rlbatch.plugins (plugins and their options), python -m rlbatch.convert --help.
"""


def main(arguments: Sequence[str]) -> int:
    """Runs the command, with overrides or ``--help``, and returns its exit code."""
    if {"-h", "--help"} & set(arguments):
        end_with_reader()
        return exit_code_of_display(_help(arguments))
    try:
        config, registry = compose_job(arguments)
        if config.dry_run or config.launcher == "slurm":
            end_with_reader()  # what runs does not depend on this process
        return exit_code_of_display(show(config, registry)) if config.dry_run else start(config, registry)
    except RlbatchError as error:
        print(error, file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _help(arguments: Sequence[str]) -> int:
    try:
        print(help_text(text_value(arguments, "cluster_dir")))
    except RlbatchError as error:
        print(error, file=sys.stderr)
        return REFUSED
    return 0


def help_text(cluster_dir: str = "") -> str:
    """What ``--help`` prints: introduction, config groups with their choices, every key with its default; raises ConfigError without that
    folder.
    """
    embedded = " ".join(f"{key}={show_value(value)}" for key, value in choice_values("experiment", EMBEDDED).items())
    preset = fill(f"experiment=embedded, the default, sets {embedded}", HELP_COLUMNS, break_on_hyphens=False, subsequent_indent="  ")
    sections = [INTRODUCTION, "Groups (group=choice):", *_group_lines(cluster_dir), "", preset, "", "Keys (key=value):"]
    section = ""
    for doc in key_docs(Config):
        if doc.name.partition(".")[0] != section and "." in doc.name:
            section = doc.name.partition(".")[0]
            sections.append("")
        sections.append(_key_line(doc))
    return "\n".join(sections)


def _group_lines(cluster_dir: str) -> list[str]:
    choices = {group: set(names) for group, names in group_files(cluster_dir).items()}
    choices["layout"].add(AUTO)
    note = []
    try:
        registry = load_plugins()
        for table in registry.tables:
            choices.setdefault(table.key, set()).update(table)
    except PluginError as error:
        note = [f"  (plugins are not listed: {error})"]
    return [f"  {group:<20} {', '.join(sorted(names))}" for group, names in choices.items()] + note


def _key_line(doc: KeyDoc) -> str:
    default = show_value(doc.default)
    words = f" ({doc.type})" if "`" in doc.type or "null" in doc.type else ""
    return f"  {f'{doc.name}={default}':<42} {doc.doc}{words}"


if __name__ == "__main__":
    keep_output()
    sys.exit(main(sys.argv[1:]))
