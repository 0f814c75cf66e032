"""Generation through rlbatch against bare vLLM: ``python -m benchmarks.rollout [device=cuda:0] [gib=2] [kind=qwen3] [rounds=3] [...]``.

One engine, in its own process as in a run, gets the same requests in turn from a rank through rlbatch's backend, and from a loop beside
it in that process that calls ``AsyncLLM.generate`` and nothing else. Prints medians: tokens/s of both and the share. Options:
``prompts=64 samples=8 prompt_tokens=64 response_tokens=256``, ``python=<interpreter with vLLM>``, and any of vLLM's own.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlbatch.engines.host.server import Send
from rlbatch.engines.protocol.frames import pack_ints, unpack_ints
from rlbatch_plugins.vllm_host.engine import VllmEngine

ENGINE = {"max_model_len": 512, "max_num_seqs": 512}


class BenchmarkEngine(VllmEngine):
    """With one more operation."""

    async def op_bare(self, header: dict[str, Any], payload: bytes, send: Send) -> dict[str, Any]:
        """All samples at once, straight from vLLM: ``seconds`` and ``tokens``."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        async def sample(name: str, prompt: list[int], seed: int) -> int:
            params = SamplingParams(
                seed=seed,
                temperature=header["temperature"],
                max_tokens=header["max_tokens"],
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            output = None
            async for answer in self._llm.generate({"prompt_token_ids": prompt}, params, name):
                output = answer
            return len(output.outputs[0].token_ids) if output else 0

        started = time.perf_counter()
        prompts = unpack_ints(payload, header["lengths"])
        work = [
            sample(f"{header['id']}-{i}-{j}", prompt, 1000 * i + j) for i, prompt in enumerate(prompts) for j in range(header["samples"])
        ]
        tokens = sum(await asyncio.gather(*work))
        return {"seconds": time.perf_counter() - started, "tokens": tokens}


def main(arguments: list[str]) -> None:
    """Runs the benchmark."""
    from benchmarks.models import random_model
    from rlbatch.api import Prompt, RolloutContext, SamplingParams
    from rlbatch.engines.backend.hosted import HostedRollout
    from rlbatch.weights.export import buckets
    from rlbatch_plugins.rollout_vllm import VllmOptions, program

    said = dict(argument.split("=", 1) for argument in arguments)
    device, gib, kind = said.pop("device", "cuda:0"), float(said.pop("gib", 2)), said.pop("kind", "qwen3")
    numbers = {"rounds": 3, "prompts": 64, "samples": 8, "prompt_tokens": 64, "response_tokens": 256}
    numbers |= {name: int(said.pop(name)) for name in list(numbers) if name in said}
    engine = ENGINE | {name: value if name == "python" else json.loads(value) for name, value in said.items()}
    with tempfile.TemporaryDirectory() as scratch:
        model = random_model(Path(scratch) / "model", kind, gib, device)
        folder = Path(scratch) / "engine"
        context = RolloutContext(model.folder, device, model.dtype, engine=engine, folder=folder)
        options = VllmOptions(sleep_level=0)

        def benchmark(devices: Sequence[str]) -> Any:
            made = program(context, options, 0, devices)
            path = {"PYTHONPATH": f"{folder / 'site'}:{Path(__file__).resolve().parents[1]}"} if made.python else {}
            return replace(made, engine="benchmarks.rollout:BenchmarkEngine", variables={**made.variables, **path})

        rollout = HostedRollout(context, options, benchmark)
        try:
            rollout.update_weights(buckets(model.named(), 512, 0))
            prompts = [Prompt(i, "", tuple(range(2 + i, 2 + i + numbers["prompt_tokens"]))) for i in range(numbers["prompts"])]
            params = SamplingParams(1.0, numbers["response_tokens"], (), numbers["samples"], (0, 0))
            header = {
                "lengths": [len(prompt.token_ids) for prompt in prompts],
                "samples": params.samples_per_prompt,
                "temperature": params.temperature,
                "max_tokens": params.max_response_tokens,
            }
            assert rollout._host is not None
            rates: dict[str, list[float]] = {"bare vLLM": [], "rlbatch": []}

            def bare_vllm() -> float:
                answer = rollout._host.call("bare", header, pack_ints(prompt.token_ids for prompt in prompts), limit_s=3600.0)
                return float(answer["tokens"] / answer["seconds"])

            def rlbatch() -> float:
                started = time.perf_counter()
                tokens = sum(len(sample.token_ids) for samples in rollout.generate(prompts, params) for sample in samples)
                return tokens / (time.perf_counter() - started)

            ways = {"bare vLLM": bare_vllm, "rlbatch": rlbatch}
            for number in range(numbers["rounds"] + 1):
                for name in list(ways)[:: 1 if number % 2 else -1]:  # neither is always the first
                    rates[name].append(ways[name]())
                if number == 0:  # kernels are compiled
                    for values in rates.values():
                        values.clear()
        except BaseException:
            print((folder / "engine.log").read_text()[-6000:])
            raise
        finally:
            rollout.close()
    shown = {name: ", ".join(f"{value:.0f}" for value in values) for name, values in rates.items()}
    bare, ours = (statistics.median(values) for values in rates.values())
    requests = f"{numbers['prompts']} prompts x {numbers['samples']} samples of {params.max_response_tokens} tokens"
    print(f"{kind}, {model.nbytes / 1e9:.2f} GB, {requests}")
    print(f"bare vLLM  {bare:10.0f} tokens/s  ({shown['bare vLLM']})")
    print(f"rlbatch    {ours:10.0f} tokens/s  ({shown['rlbatch']})  {ours / bare:.1%} of bare vLLM")


if __name__ == "__main__":
    main(sys.argv[1:])
