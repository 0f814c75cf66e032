"""What vLLM's messages cost a step: ``<interpreter with vLLM> benchmarks/vllm_messages.py``.

Answers of 512 samples, of a token each, encoded and decoded as between vLLM's core and its client: with nothing else, with log-probs, and
with the experts of 3 and of 48 layers (8 a token); and what vLLM's scheduler takes to list the blocks of all samples, which it does in each
step where it tells experts. Prints medians of 20, milliseconds. Needs no GPU, and not rlbatch.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

SAMPLES, ROUNDS = 512, 20
BLOCK = 16
"""Tokens of a block of the cache."""


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
    for tokens in (320, 8192):
        blocks = [KVCacheBlocks(([KVCacheBlock(number) for number in range(tokens // BLOCK)],)) for _ in range(SAMPLES)]
        took = []
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            for each in blocks:
                each.get_block_ids()
            took.append(time.perf_counter() - begun)
        print(f"blocks of samples of {tokens} tokens: {1e3 * statistics.median(took):.2f} ms")


if __name__ == "__main__":
    main()
