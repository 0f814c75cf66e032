"""Generation through rlbatch against bare vLLM: ``python -m benchmarks.rollout [device=cuda:0] [gib=2] [kind=qwen3] [rounds=3] [...]``.

Two engines take turns, each in its own process as in a run. One gets requests from a rank through rlbatch's backend. The other's scheduler
and draws are vLLM's own; it gets them from a loop beside it in its process that calls ``AsyncLLM.generate`` and nothing else: with the same
seeds and log-probs, without seeds, and without either. Prints each round, and medians: tokens/s of each way; rlbatch's share in the same
round, with the middle half of the rounds; and CPU seconds of the engine's processes, which other work on the machine changes less.
``routes=1`` compares rlbatch's engine with one that says which experts its tokens went to, of a model with experts; with ``stops=300`` the
last 300 tokens of the vocabulary end a sample, so that samples end at all times. The GPU has memory for both:
``gpu_memory_utilization=0.3`` of each. Options: ``prompts=64 samples=8 prompt_tokens=64 response_tokens=256``,
``python=<interpreter with vLLM>``, and any of vLLM's own.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from rlbatch.engines.host.server import Send
from rlbatch.engines.protocol.frames import pack_ints, unpack_ints
from rlbatch_plugins.vllm_host import engine_options, versions
from rlbatch_plugins.vllm_host.engine import VllmEngine

ENGINE = {"max_model_len": 512, "max_num_seqs": 512}
BARE = "vLLM"


class BareEngine(VllmEngine):
    """vLLM as it is, with one more operation."""

    async def op_start(self, header: dict[str, Any], payload: bytes, send: Send) -> dict[str, Any]:
        """See ``VllmEngine``."""
        original = versions.ask_workers

        async def ask_workers(llm: Any, method: str, *arguments: Any) -> list[Any]:
            return [] if method == "rlbatch_draw" else await original(llm, method, *arguments)

        versions.ask_workers = ask_workers
        del engine_options.FIXED["scheduler_cls"]
        return await super().op_start(header, payload, send)

    async def op_bare(self, header: dict[str, Any], payload: bytes, send: Send) -> dict[str, Any]:
        """All samples at once, straight from vLLM, maybe ``seeded`` and with ``logprobs``: ``seconds`` and ``tokens``."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        async def sample(name: str, prompt: list[int], seed: int) -> int:
            params = SamplingParams(
                seed=seed if header["seeded"] else None,
                temperature=header["temperature"],
                max_tokens=header["max_tokens"],
                ignore_eos=True,
                stop_token_ids=header["stop_token_ids"],
                logprobs=0 if header["logprobs"] else None,
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


def started(model: Any, device: str, folder: Path, engine: dict[str, Any], *, is_bare: bool, with_routes: bool) -> Any:
    """An engine with the model's weights."""
    from rlbatch.api import RolloutContext
    from rlbatch.engines.backend.hosted import HostedRollout
    from rlbatch.weights.export import buckets
    from rlbatch_plugins.rollout_vllm import VllmOptions, program

    context = RolloutContext(model.folder, device, model.dtype, engine=engine, folder=folder, with_routes=with_routes)
    options = VllmOptions(sleep_level=0)

    def benchmark(devices: Sequence[str]) -> Any:
        made = program(context, options, 0, devices)
        path = {"PYTHONPATH": f"{folder / 'site'}:{Path(__file__).resolve().parents[1]}"} if made.python else {}
        name = "benchmarks.rollout:BareEngine" if is_bare else made.engine
        return replace(made, engine=name, variables={**made.variables, **path})

    try:
        rollout = HostedRollout(context, options, benchmark)
        rollout.update_weights(buckets(model.named(), 512, 0))
    except BaseException:
        print((folder / "engine.log").read_text()[-6000:])
        raise
    return rollout


def main(arguments: list[str]) -> None:
    """Runs the benchmark."""
    from benchmarks.models import random_model
    from rlbatch.api import Prompt, SamplingParams

    said = dict(argument.split("=", 1) for argument in arguments)
    device, gib, kind = said.pop("device", "cuda:0"), float(said.pop("gib", 2)), said.pop("kind", "qwen3")
    second = "rlbatch, with routes" if said.pop("routes", "") == "1" else BARE
    numbers = {"rounds": 3, "prompts": 64, "samples": 8, "prompt_tokens": 64, "response_tokens": 256, "stops": 0}
    numbers |= {name: int(said.pop(name)) for name in list(numbers) if name in said}
    engine = ENGINE | {name: value if name == "python" else json.loads(value) for name, value in said.items()}
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        model = random_model(Path(scratch) / "model", kind, gib, device)
        prompts = [Prompt(i, "", tuple(range(2 + i, 2 + i + numbers["prompt_tokens"]))) for i in range(numbers["prompts"])]
        vocab = len(model.stacks["lm_head.weight"])
        stops = tuple(range(vocab - numbers["stops"], vocab))
        params = SamplingParams(1.0, numbers["response_tokens"], stops, numbers["samples"], (0, 0))
        header = {
            "lengths": [len(prompt.token_ids) for prompt in prompts],
            "samples": params.samples_per_prompt,
            "temperature": params.temperature,
            "max_tokens": params.max_response_tokens,
            "stop_token_ids": stops,
        }
        engines = {}
        for number, name in enumerate(("rlbatch", second)):
            folder, is_bare = Path(scratch) / f"engine_{number}", name == BARE
            engines[name] = started(model, device, folder, engine, is_bare=is_bare, with_routes=number == 1 and not is_bare)
            stack.callback(engines[name].close)

        def bare_vllm(*, seeded: bool, logprobs: bool) -> float:
            asked = {**header, "seeded": seeded, "logprobs": logprobs}
            answer = engines[BARE]._host.call("bare", asked, pack_ints(prompt.token_ids for prompt in prompts), limit_s=3600.0)
            return float(answer["tokens"] / answer["seconds"])

        def rlbatch(name: str) -> float:
            asked, begun = replace(params, with_routes=name.endswith("routes")), time.perf_counter()
            tokens = sum(len(sample.token_ids) for samples in engines[name].generate(prompts, asked) for sample in samples)
            return tokens / (time.perf_counter() - begun)

        ways: dict[str, Callable[[], float]] = {name: partial(rlbatch, name) for name in engines if name != BARE}
        if second == BARE:
            ways |= {
                "vLLM, seeds and log-probs": partial(bare_vllm, seeded=True, logprobs=True),
                "vLLM, log-probs": partial(bare_vllm, seeded=False, logprobs=True),
                "vLLM, neither": partial(bare_vllm, seeded=False, logprobs=False),
            }
        hosts = {name: psutil.Process(engine._host.pid) for name, engine in engines.items()}

        def cpu_seconds(name: str) -> float:
            host = hosts[name if name in hosts else BARE]
            times = [each.cpu_times() for each in (host, *host.children(recursive=True))]
            return sum(each.user + each.system for each in times)

        rates: dict[str, list[float]] = {name: [] for name in ways}
        cpu: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(numbers["rounds"] + 1):
            for name in list(ways)[:: 1 if number % 2 else -1]:  # neither is always the first
                before = cpu_seconds(name)
                rates[name].append(ways[name]())
                cpu[name].append(cpu_seconds(name) - before)
            if number == 0:  # kernels are compiled
                for values in (*rates.values(), *cpu.values()):
                    values.clear()
            else:
                print(f"round {number}, tokens/s:", "; ".join(f"{name} {own[-1]:.0f}" for name, own in rates.items()), flush=True)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    requests = f"{numbers['prompts']} prompts x {numbers['samples']} samples of {params.max_response_tokens} tokens"
    print(f"{kind}, {model.nbytes / 1e9:.2f} GB, {requests}")
    for name, median in medians.items():
        shares = [own / other for own, other in zip(rates["rlbatch"], rates[name], strict=True)]
        low, middle, high = statistics.quantiles(shares, n=4, method="inclusive") if len(shares) > 1 else shares * 3
        print(
            f"{name:<26}{median:10.0f} tokens/s, CPU {statistics.median(cpu[name]):.2f} s; rlbatch has {medians['rlbatch'] / median:.1%} "
            f"of it, {middle:.1%} ({low:.1%} to {high:.1%}) in the same round"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
