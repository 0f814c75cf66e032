"""A save against ``dd``: ``python -m benchmarks.checkpoint [writers=2] [gigabytes=1] [rounds=2] [folder=/tmp]``.

Each writer is a process with so many GB of optimizer state, of stacked experts: gate and up halves lie apart in a checkpoint, and the state
begins and ends in the middle of an expert, as a data-parallel rank's does. In turn the writers write it, as ranks do, and as many ``dd``
(``oflag=direct conv=fsync``) as much. Prints GB/s of both until the last is on the disk, the share of ``dd``'s, what the fullest writer
took of memory beyond its state, and processor time. Exits with 1 if the median share is below 70 %, or a writer took more than its buffers
and 64 MiB. Removes all that it wrote.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from rlbatch.checkpoint.block_file import BLOCK_BYTES, BLOCKS
from rlbatch.megatron.checkpoint_chunks import ParameterChunk
from rlbatch.megatron.held_parts import PART_BYTES, parts
from rlbatch.megatron.state_writer import _write_files, plan

ROWS, COLUMNS = 1536, 2048
"""Of the gate and up matrices of an expert, together."""
WANTED = 0.7
MARGIN_BYTES = 2**26


def write(rank: int, gigabytes: float, folder: Path) -> None:
    """A writer: says when it is ready, begins when it is told to, and says what memory it took."""
    experts = max(2, round(gigabytes * 1e9 / 3 / 4 / (ROWS * COLUMNS)))
    shape, first = (experts + 1, ROWS, COLUMNS), ROWS * COLUMNS // 2
    halves = [ParameterChunk("", shape, (0, row, 0), (experts + 1, ROWS // 2, COLUMNS), "", shape, (0, row, 0)) for row in (0, ROWS // 2)]
    state = {name: torch.randn(experts * ROWS * COLUMNS) for name in ("param", "exp_avg", "exp_avg_sq")}
    planned = plan((part for half in halves for name, run in state.items() for part in parts(run, first, half, name)), rank)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
    before = _status("VmRSS")
    print("ready", flush=True)
    sys.stdin.readline()
    began = time.process_time()
    _write_files(folder, planned)
    print(_status("VmHWM") - before, time.process_time() - began, flush=True)


def _status(key: str) -> int:
    """Bytes, of /proc/self/status."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{key}:")))


def save(writers: int, gigabytes: str, folder: Path) -> tuple[float, int, float]:
    """Seconds until all have written, the most that one of them took of memory, and processor time of all."""
    command = [sys.executable, "-m", "benchmarks.checkpoint", f"gigabytes={gigabytes}", f"folder={folder}"]
    ranks = [
        subprocess.Popen([*command, f"rank={rank}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for rank in range(writers)
    ]
    for rank in ranks:
        assert rank.stdout
        if rank.stdout.readline() != "ready\n":
            raise SystemExit("a writer did not begin")
    started = time.perf_counter()
    for rank in ranks:
        assert rank.stdin
        rank.stdin.write("\n")
        rank.stdin.flush()
    said = [rank.stdout.readline().split() for rank in ranks if rank.stdout]
    seconds = time.perf_counter() - started  # until the last has written: its end, and to give its state back, takes time too
    for rank in ranks:
        rank.communicate()
    taken, busy = zip(*said, strict=True)
    return seconds, max(map(int, taken)), sum(map(float, busy))


def dd(writers: int, nbytes: int, folder: Path) -> float:
    """Seconds until as many ``dd`` have written as much."""
    count = nbytes // writers // BLOCK_BYTES
    options = [f"bs={BLOCK_BYTES}", f"count={count}", "oflag=direct", "conv=fsync", "status=none"]
    started = time.perf_counter()
    copies = [subprocess.Popen(["dd", "if=/dev/zero", f"of={folder / str(number)}", *options]) for number in range(writers)]
    if sum(copy.wait() for copy in copies):
        raise SystemExit("dd failed")
    return (time.perf_counter() - started) * nbytes / (count * BLOCK_BYTES * writers)


def main(arguments: list[str]) -> int:
    """Measures and prints; the exit code."""
    options = {"writers": "2", "gigabytes": "1", "rounds": "2", "folder": tempfile.gettempdir()}
    options |= dict(argument.split("=", 1) for argument in arguments)
    if "rank" in options:
        write(int(options["rank"]), float(options["gigabytes"]), Path(options["folder"]))
        return 0
    writers, shares, most = int(options["writers"]), [], 0
    for number in range(int(options["rounds"])):
        root = Path(tempfile.mkdtemp(prefix="checkpoint", dir=options["folder"]))
        try:
            seconds, taken, busy = save(writers, options["gigabytes"], root)
            nbytes = sum(path.stat().st_size for path in root.iterdir())
            shutil.rmtree(root)
            root.mkdir()
            compared = dd(writers, nbytes, root)
        finally:
            shutil.rmtree(root, ignore_errors=True)
        shares.append(compared / seconds)
        most = max(most, taken)
        rates = f"save {nbytes / seconds / 1e9:.2f} GB/s, dd {nbytes / compared / 1e9:.2f} GB/s, share {shares[-1]:.0%}"
        print(
            f"round {number + 1}: {nbytes / 1e9:.2f} GB by {writers} writers, {rates}, {taken / 2**20:.0f} MiB of memory, "
            f"{busy * 1e9 / nbytes:.2f} s of processor time a GB",
            flush=True,
        )
    return int(statistics.median(shares) < WANTED or most > PART_BYTES + BLOCKS * BLOCK_BYTES + MARGIN_BYTES)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
