"""``run.json``: makes a folder a run folder, and says which run is in it, so that a run deletes and replaces nothing but its own."""

from __future__ import annotations

import json
import os
import secrets
from contextlib import suppress
from pathlib import Path

import rlbatch
from rlbatch.api import LaunchError, RlbatchError
from rlbatch.config.compose import CONFIG_FILE, load_config
from rlbatch.config.foreign import read_own
from rlbatch.launch.records.attempt import read_attempt

MARK = "run.json"


def read_mark(run_dir: Path) -> str:
    """The id of the run whose folder it is; empty: it has none."""
    with suppress(OSError, ValueError, KeyError):
        return str(read_own(run_dir / MARK)["run"])
    return ""


def mark(run_dir: Path) -> str:
    """As ``read_mark``, of a folder that exists; one without an id gets one.

    Raises:
        OSError: it cannot be written.
    """
    run = read_mark(run_dir)
    if not run:
        run = secrets.token_hex(16)
        draft = run_dir / f".{MARK}.{run[:8]}"
        draft.write_text(json.dumps({"run": run, "rlbatch": rlbatch.__version__}) + "\n", encoding="utf-8")
        os.replace(draft, run_dir / MARK)
    return run


def is_run_folder(folder: Path) -> bool:
    """Whether a run is in it, also one that was begun before there were marks."""
    if read_mark(folder):
        return True
    with suppress(OSError, LaunchError):
        if read_attempt(folder):
            return True
    try:
        return bool(load_config(folder / CONFIG_FILE).run_dir)
    except RlbatchError:
        return False
