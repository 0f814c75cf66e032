"""What vLLM's messages cost a step: ``<interpreter with vLLM> benchmarks/vllm_messages.py``.

Answers of 512 samples, of a token each, encoded and decoded as between vLLM's core and its client: with nothing else, with log-probs, and
with the experts of 3 and of 48 layers (8 a token); and what experts cost its scheduler: to list the blocks of all samples and to keep what
each was told, as it does in each step by itself, and to write them into the cache's table once. Prints medians of 20,
milliseconds. Needs no GPU, and not rlbatch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

SAMPLES, ROUNDS = 512, 20
BLOCK = 16
"""Tokens of a block of the cache."""
TOKENS = 320
"""Of a sample."""


def main() -> None:
    """Prints a line for each kind of answer."""
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.outputs import LogprobsLists
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    values = LogprobsLists(*(np.zeros(shape, kind) for shape, kind in (((SAMPLES, 1), "i4"), ((SAMPLES, 1), "f4"), ((SAMPLES,), "i4"))))
    kinds: dict[str, Any] = {"tokens alone": lambda _: {}, "log-probs": lambda row: {"new_logprobs": values.slice_request(row, 1)}}
    for layers in (3, 48):
        routes = np.zeros((SAMPLES, layers, 8), "u1")
        kinds[f"experts, {layers} layers"] = lambda row, routes=routes: {"routed_experts": routes[row : row + 1]}
    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
    for name, more in kinds.items():
        outputs = EngineCoreOutputs(outputs=[EngineCoreOutput(f"sample-{row}", [5], **more(row)) for row in range(SAMPLES)])
        seconds = []
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            parts = encoder.encode(outputs)
            encoded = time.perf_counter()
            decoder.decode([bytes(part) for part in parts])
            seconds.append((encoded - begun, time.perf_counter() - encoded))
        encode, decode = (1e3 * statistics.median(each) for each in zip(*seconds, strict=True))
        print(f"{name:<20} encode {encode:6.2f} ms, decode {decode:6.2f} ms, {len(parts)} parts")
    for layers in (3, 48):
        made, slots = np.zeros((SAMPLES, layers, 8), "i4"), np.arange(SAMPLES) * BLOCK
        table = np.zeros((SAMPLES * BLOCK, layers, 8), "u1")
        kept = [bytearray() for _ in range(SAMPLES)]
        blocks = [KVCacheBlocks(([KVCacheBlock(number) for number in range(TOKENS // BLOCK)],)) for _ in range(SAMPLES)]

        def write(made: Any = made, slots: Any = slots, table: Any = table) -> None:
            table[slots] = made

        def keep(made: Any = made, blocks: Any = blocks, kept: Any = kept) -> None:
            for each in blocks:
                each.get_block_ids()
            narrow = made.astype("u1")
            for row, each in enumerate(kept):
                each += narrow[row : row + 1].tobytes()

        print(f"experts of {layers} layers: listed and kept {_median(keep):.2f} ms, written {_median(write):.2f} ms")


def _median(work: Callable[[], None]) -> float:
    """Milliseconds."""
    took = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        work()
        took.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(took)


if __name__ == "__main__":
    main()
