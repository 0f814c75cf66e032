"""A whole job on two nodes that this machine pretends to be: ``python -m tests.gpu.vllm_nodes [--kill=3] [--layers=8] [key=value ...]``.

One vLLM engine over both, of two data-parallel ranks with half of the experts each, which share their GPUs with the trainer's ranks. Each
rank sees one GPU alone, and has a host name of its own: so rlbatch and NCCL take them for two machines, and NCCL goes over sockets of the
loopback interface. As root, what a rank starts has that name too (a UTS namespace). ``--kill``: in the middle of that step's generation
the engine's host on the second node is killed; the job must start both parts anew and go on.

The task and the model are those of ``tests.gpu.vllm_job``. Without GPUs it runs on CPUs: ``--layers=2 --experts=8 --hidden=64
rollout.engine.python=<interpreter>``.
"""

from __future__ import annotations

import ctypes
import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from rlbatch.launch.ranks.children import dies_with_parent
from rlbatch.launch.ranks.rank_info import visible_gpus
from rlbatch.launch.ranks.variables import LAUNCH_VARIABLE
from tests.gpu.vllm_job import parser_of, print_logs, print_scalars, written_task
from tests.leftovers import wait_until_gone

NODES = ("node0", "node1")
CLONE_NEWUTS = 0x04000000
RANK = "import socket, sys; name = sys.argv.pop(); socket.gethostname = lambda: name; from rlbatch.run import main; main()"
JOB = (
    "launcher=none",
    "cluster.gpus_per_node=1",
    "cluster.interface=lo",
    "layout.world_size=2",
    "layout.ep_size=2",
    "rollout=vllm",
    "rollout.options.gpus_per_engine=2",
    "rollout.engine.data_parallel_size=2",
    "rollout.engine.enable_expert_parallel=true",
    "rollout.engine.max_model_len=128",
    "rollout.engine.max_num_seqs=32",  # several batches, so that a generation has a middle
    "train.steps=10",
    "train.eval_interval=0",
)
ON_GPU = (
    "train.precision=bf16",
    "optimizer.lr=5e-5",
    "rollout.max_logprob_diff=0.3",
    "rollout.engine.enforce_eager=true",
    "rollout.engine.gpu_memory_utilization=0.3",
)
ON_CPU = ("+cluster=local",)
TOLD = (r"world_size=\d+ rank=\d+ local_rank", r"EP Rank \d", r"later weight syncs", r"Sleep mode freed", r"It took .* wake up tags")
"""Lines of an engine's log that show what it did."""


def main() -> int:
    """Writes the task, runs the job, prints what it measured."""
    parser = parser_of(__doc__)
    parser.add_argument("--kill", type=int, default=0, help="Step; 0: nothing is killed.")
    options, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = Path(scratch) / "run"
        gpus = visible_gpus()
        job = [*(ON_GPU if gpus else ON_CPU), *JOB, *written_task(Path(scratch) / "task", options), f"run_dir={run_dir}", *overrides]
        if code := subprocess.run([sys.executable, "-m", "rlbatch.submit", *job], check=False).returncode:
            return code
        (run_dir / "nccl").mkdir()
        launch = secrets.token_hex(8)
        ranks = [_start(node, run_dir, launch, on_gpu=gpus > 0) for node in range(len(NODES))]
        code = _wait(ranks, run_dir, options.kill)
        print_scalars(run_dir)
        lost = len(list(run_dir.glob("engines/*/engine_1.log")))
        if code:
            print_logs(run_dir)
        _print_engines(run_dir)
        print(f"exit code {code}; parts of the engine that were started anew: {lost}", flush=True)
        wait_until_gone(run_dir)
    return code or int(lost != (len(NODES) if options.kill else 0))


def _start(node: int, run_dir: Path, launch: str, *, on_gpu: bool) -> subprocess.Popen[bytes]:
    """A rank with a node of its own, as Open MPI would start it."""
    name = NODES[node]
    variables = {
        "OMPI_COMM_WORLD_RANK": str(node),
        "OMPI_COMM_WORLD_SIZE": str(len(NODES)),
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
        LAUNCH_VARIABLE: launch,
        "PYTHONUNBUFFERED": "1",
        "NCCL_HOSTID": name,
        "NCCL_IB_DISABLE": "1",  # these nodes have no other network than the loopback interface
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_FILE": f"{run_dir}/nccl/{name}.%p",
    }
    if on_gpu:
        variables["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[node]
    return subprocess.Popen(
        [sys.executable, "-c", RANK, "--run-dir", str(run_dir), name], env=os.environ | variables, preexec_fn=_on_node(name)
    )


def _on_node(name: str) -> Callable[[], None]:
    """A ``preexec_fn``: the child has another host name, if it may, and ends with this process."""
    libc, end_with_parent = ctypes.CDLL(None), dies_with_parent()

    def preexec() -> None:
        if libc.unshare(CLONE_NEWUTS) == 0:
            socket.sethostname(name)
        end_with_parent()

    return preexec


def _wait(ranks: list[subprocess.Popen[bytes]], run_dir: Path, kill: int) -> int:
    """Until all ranks have ended; returns the first exit code that is not 0."""
    while any(rank.poll() is None for rank in ranks):
        if kill and any(run_dir.glob(f"groups/step_{kill:06d}/prompt_*")):
            _kill_host(ranks[1].pid)
            kill = 0
        time.sleep(0.005)
    return next((rank.returncode for rank in ranks if rank.returncode), 0)


def _kill_host(rank: int) -> None:
    for child in psutil.Process(rank).children():
        with suppress(psutil.NoSuchProcess):
            if "vllm_host" in " ".join(child.cmdline()):
                print(f"killing process {child.pid}, the engine's host on {NODES[1]}", flush=True)
                child.kill()


def _print_engines(run_dir: Path) -> None:
    """What shows that the engine is in two parts, and how NCCL went from one to the other."""
    for log in sorted(run_dir.glob("engines/*/engine*.log")):
        lines = log.read_text(errors="replace").splitlines()
        for pattern in TOLD:
            found = [line[match.start() :] for line in lines if (match := re.search(pattern, line))]
            if found:
                print(f"{log.relative_to(run_dir)}: {len(found)} x {found[-1][:120]}", flush=True)
    for node in NODES:
        texts = [file.read_text(errors="replace") for file in (run_dir / "nccl").glob(f"{node}.*")]
        ways = re.findall(r" via (P2P|SHM|NET/\w+)", "".join(texts))
        counts = ", ".join(f"{ways.count(way)} via {way}" for way in sorted(set(ways)))
        print(f"NCCL's channels in {len(texts)} processes of {node}: {counts or 'none'}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
