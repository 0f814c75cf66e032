"""Does scoring overlap generation? Jobs of a few steps with a reward that sleeps: not, as long as generation takes, half and twice that.

    python -m benchmarks.overlap [key=value of rlbatch.submit ...]

By default the embedded run on one rank with ``rollout=vllm`` (``rollout.engine.python=.venv-vllm/bin/python``), 256 samples a step of which
the engine takes 4 at once, and 8 workers. The reward gives 0, so that each job samples the same. Prints medians over the steps behind the
first: generation and scoring together, beside the longer of the two: generation alone, and what the workers sleep in all. On a machine
that does other things too, generation of the same step is the better measure.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rlbatch.metrics.metrics_file import METRICS, metric_lines

SAMPLES, WORKERS, STEPS = 256, 8, 5
SHARES = (1.0, 0.5, 2.0)
SLEEPING = """
import time
from dataclasses import dataclass

from rlbatch.api import RewardSpec, hookimpl


@dataclass(frozen=True)
class Options:
    seconds: float = 0.0


def build(options):
    def sleeping(samples):
        time.sleep(options.seconds)
        return [0.0] * len(samples)

    return sleeping


@hookimpl
def rlbatch_register_rewards():
    return {"sleeping": RewardSpec(build, Options, scope="sample")}
"""


def steps(folder: Path, name: str, seconds: float, arguments: list[str]) -> list[dict[str, float]]:
    """Metrics of a job's steps behind the first; each sample is scored in so many seconds."""
    run_dir = folder / name
    given = [
        "rollout=vllm",
        "rollout.engine.python=.venv-vllm/bin/python",
        "rollout.engine.max_num_seqs=4",
        "rollout.max_response_tokens=56",
        "layout.world_size=1",
        "layout.ep_size=1",
        f"train.prompts_per_step={SAMPLES // 8}",
        "algorithm.group_size=8",
        "train.updates_per_step=1",
        f"train.steps={STEPS}",
        "data.eval=",
        "checkpoint.save_interval=-1",
        "trackers=[jsonl]",
        f"plugins=['{folder / 'sleeping.py'}']",
        "reward=sleeping",
        f"reward.workers={WORKERS}",
        f"reward.options.seconds={seconds}",
        f"run_dir={run_dir}",
    ]
    done = subprocess.run([sys.executable, "-m", "rlbatch.submit", *given, *arguments], stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    found: dict[int, dict[str, float]] = {}
    for step, said in metric_lines(run_dir / METRICS):
        found.setdefault(step, {}).update(said)
    return [said for step, said in sorted(found.items()) if step > 1 and "time/rollout_s" in said]


def main(arguments: list[str]) -> None:
    """Runs the jobs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sleeping.py").write_text(SLEEPING)

        def seconds(said: dict[str, float]) -> float:
            return said["time/rollout_s"] + said["time/reward_s"]

        alone = statistics.median(map(seconds, steps(folder, "alone", 0.0, arguments)))
        print(f"generation alone: {alone:.2f} s ({os.cpu_count()} cores)", flush=True)
        for share in SHARES:
            slept = alone * share
            both = steps(folder, f"share{share}", slept * WORKERS / SAMPLES, arguments)
            took, whole = statistics.median(map(seconds, both)), statistics.median(said["time/step_s"] for said in both)
            own = statistics.median(seconds(said) / max(said["time/rollout_s"], slept) for said in both)
            print(f"scoring alone {slept:.2f} s: both {took:.2f} s, {took / max(alone, slept):.2f} of the longer (step {whole:.2f} s)")
            print(f"  {own:.2f} of the longer of scoring and the same step's generation", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
