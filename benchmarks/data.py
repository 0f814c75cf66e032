"""Measures what the data of a job takes before its first step: seconds, and memory of a rank.

    python benchmarks/data.py [rows=1000000] [kind=jsonl|jsonl.gz|parquet]

Writes a file of prompts of 300 tokens, about 1.3 KB a row, into a temporary folder, and then, in a process of its own as on a rank, does
what a job does: index, a look at rows for some seconds, the order, the first step's 512 prompts, tokenised. Prints wall and processor
seconds, and the memory that it took beyond what was imported.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TOKENS, STEP = 300, 512


def write(path: Path, rows: int) -> None:
    """Rows of which each begins in its own way; the embedded task's tokenizer makes a token of each letter."""
    generator = random.Random(0)
    tails = [" ".join(generator.choices("abcdefghij", k=TOKENS - 7)) for _ in range(997)]
    rest = ", ".join(json.dumps(item) for item in ["x" * 590])

    def line(number: int) -> str:
        return f'{{"prompt": "{" ".join(f"{number:07d}".translate(DIGITS))} {tails[number % 997]}", "label": "a", "solution": {rest}}}\n'

    if path.name.endswith(".parquet"):
        import pyarrow
        import pyarrow.parquet

        writer = None
        for start in range(0, rows, 65536):
            table = pyarrow.Table.from_pylist([json.loads(line(number)) for number in range(start, min(start + 65536, rows))])
            writer = writer or pyarrow.parquet.ParquetWriter(path, table.schema)
            writer.write_table(table)
        assert writer
        writer.close()
        return
    with gzip.open(path, "wt", compresslevel=1) if path.name.endswith(".gz") else path.open("w") as file:
        for number in range(rows):
            file.write(line(number))


DIGITS = str.maketrans("0123456789", "abcdefghij")


def memory(key: str) -> float:
    """MiB of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024


def measure(path: Path, folder: Path) -> None:
    """On a rank of a job of one."""
    import torch.distributed as dist

    from rlbatch.config.compose import compose
    from rlbatch.prompts.embedded import write_embedded_task
    from rlbatch.prompts.model_folder import load_tokenizer
    from rlbatch.prompts.prompt_store import open_training
    from rlbatch.registry import load_plugins

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    write_embedded_task(folder, 0)
    model = folder / "model"
    described = {**json.loads((model / "config.json").read_text()), "max_position_embeddings": 4096}
    (model / "config.json").write_text(json.dumps(described))
    registry = load_plugins()
    family = registry.resolve_model_family(described)
    tokenizer = load_tokenizer(model, model)
    config = compose([f"data.train={path}", f"train.prompts_per_step={STEP}", "train.updates_per_step=1"])
    before, started, computed = memory("VmRSS"), time.monotonic(), time.process_time()
    training = open_training(config, folder, family, tokenizer, registry, print)
    opened = time.monotonic() - started
    prompts = [training.prompts[position] for position in training.order.take(STEP)]
    wall, computed = time.monotonic() - started, time.process_time() - computed
    assert {len(prompt.token_ids) for prompt in prompts} == {TOKENS}
    print(
        f"{path.name}: {len(training.prompts)} rows, {path.stat().st_size / 1e9:.2f} GB: {wall:.1f} s until the first step's {STEP} "
        f"prompts ({opened:.1f} s to open), {computed:.1f} s of a processor; {memory('VmHWM') - before:.0f} MiB more than the "
        f"{before:.0f} MiB before, {os.cpu_count()} cores"
    )
    dist.destroy_process_group()


def main(arguments: list[str]) -> None:
    """Writes the file, and measures in a new process."""
    given = dict(argument.split("=") for argument in arguments)
    if "measure" in given:
        measure(Path(given["measure"]), Path(given["folder"]))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"prompts.{given.get('kind', 'jsonl')}"
        write(path, int(given.get("rows", "1000000")))
        subprocess.run([sys.executable, __file__, f"measure={path}", f"folder={folder}"], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
