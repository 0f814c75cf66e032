"""Programs of Slurm that remember what they were asked, for tests without a Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

_PROGRAM = """#!/bin/sh
echo "$(basename "$0") $*" >> {folder}/calls
answer={folder}/$(basename "$0")
[ -e "$answer.out" ] && cat "$answer.out"
[ -e "$answer.err" ] && cat "$answer.err" >&2
[ -e "$answer.rc" ] && exit "$(cat "$answer.rc")"
exit 0
"""
PROGRAMS = ("sbatch", "scontrol", "sacct", "scancel", "srun", "sinfo")


class FakeSlurm:
    """Programs in a folder that is first in PATH.

    Attributes:
        folder: What they say and were asked.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
        """Puts the programs there; each succeeds and says nothing."""
        self.folder = folder
        programs = folder / "bin"
        programs.mkdir(parents=True)
        for name in PROGRAMS:
            (programs / name).write_text(_PROGRAM.format(folder=folder))
            (programs / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{programs}:{path}")

    def says(self, program: str, out: str = "", err: str = "", rc: int = 0) -> None:
        """What a program answers from now on."""
        for kind, text in (("out", out), ("err", err), ("rc", str(rc))):
            (self.folder / f"{program}.{kind}").write_text(text)

    def job(self, job_id: str, state: str, exit_code: str = "0:0", **fields: str) -> None:
        """What scontrol shows of a job."""
        words = {
            "JobId": job_id,
            "JobName": "x",
            "UserId": "me(1000)",
            "JobState": state,
            "Reason": "None",
            "Restarts": "0",
            "ExitCode": exit_code,
            **fields,
        }
        self.says("scontrol", " ".join(f"{name}={value}" for name, value in words.items()) + "\n")

    def calls(self) -> list[str]:
        """Command lines, in order."""
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []
