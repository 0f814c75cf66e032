"""SGLang's own update over a group, and rlbatch's: the same weights to an engine that has no memory of this process's.

``<SGLang's python> -m tests.gpu.sglang_nccl`` calls ``init_weights_update_group`` and ``update_weights_from_distributed`` of a bare
``sglang.Engine``; ``python -m tests.gpu.sglang_nccl ours python=<SGLang's python>`` sends through ``rollout.options.transport=collective``,
with ``lose`` also to an engine that is stopped between two broadcasts, and then started anew. On two GPUs over NCCL, without GPUs over
Gloo. Prints seconds, and the log-probs' mean difference to transformers before and after. What takes longer than ``limit=540`` seconds is
ended, with the stack of every thread here.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.gpu.random_moe import SHAPE, checkpoint

PORT = 29611
UPDATES = 3
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda:0" if ON_GPU else "cpu"
OPTIONS = {"grammar_backend": "none", "sampling_backend": "pytorch", "disable_cuda_graph": True, "context_length": 2048}
GPU_OPTIONS = {"attention_backend": "triton", "disable_prefill_cuda_graph": True, "mem_fraction_static": 0.4, "max_total_tokens": 65536}
CPU_OPTIONS = {"device": "cpu", "attention_backend": "torch_native", "max_total_tokens": 8192, "disable_overlap_schedule": True}
SMALLER = {"vocab_size": 8000, "hidden_size": 512, "moe_intermediate_size": 256, "num_experts": 16}
"""On CPUs."""
PROMPTS = [list(range(10 + i, 74 + i)) for i in range(8)]
BUCKET_MIB = 256 if ON_GPU else 16
LENGTH = 64 if ON_GPU else 16
Sampled = Callable[[], list[tuple[list[int], list[float]]]]
"""Tokens of each prompt, and their log-probs."""


def main(arguments: Sequence[str]) -> None:
    """Runs the script."""
    said = dict(argument.partition("=")[::2] for argument in arguments)
    faulthandler.dump_traceback_later(int(said.get("limit", 540)), exit=True)
    with tempfile.TemporaryDirectory() as scratch:
        model = _model(Path(scratch) / "model")
        if "ours" in said:
            _ours(model, Path(scratch), said["python"], loses="lose" in said)
        else:
            _theirs(model, Path(scratch))


def _model(folder: Path) -> Any:
    """On this process's device; its folder has no weights."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(**({**SHAPE, "num_hidden_layers": 8} if ON_GPU else {**SHAPE, **SMALLER, "num_hidden_layers": 2}))
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(folder)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(DEVICE).eval()


def _theirs(model: Any, scratch: Path) -> None:
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.managers.load_snapshot import shm_path_for
    from sglang.srt.utils import init_custom_process_group
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "0" if ON_GPU else "1")
    place = {"base_gpu_id": 1, **GPU_OPTIONS} if ON_GPU else CPU_OPTIONS
    engine = Engine(model_path=str(scratch / "model"), skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", **OPTIONS, **place)
    params = {"temperature": 1.0, "max_new_tokens": LENGTH, "ignore_eos": True}

    def sampled() -> list[tuple[list[int], list[float]]]:
        outputs = engine.generate(input_ids=PROMPTS, sampling_params=params, return_logprob=True)
        return [(output["output_ids"], [value for value, *_ in output["meta_info"]["output_token_logprobs"]]) for output in outputs]

    print(f"before: {_difference(sampled, model):.3f} nats", flush=True)
    groups: list[Any] = []
    meet = {"backend": "nccl" if ON_GPU else "gloo", "world_size": 2, "group_name": "weights"}
    joining = threading.Thread(
        target=lambda: groups.append(init_custom_process_group(init_method=f"tcp://127.0.0.1:{PORT}", rank=0, **meet)), daemon=True
    )
    joining.start()
    print("join:", engine.init_weights_update_group(master_address="127.0.0.1", master_port=PORT, rank_offset=1, **meet), flush=True)
    joining.join()
    for attempt in range(UPDATES):
        named = [(name, tensor.contiguous()) for name, tensor in checkpoint(model)]
        started = time.monotonic()
        flat = FlattenedTensorBucket(named_tensors=named).get_flattened_tensor()
        sending = threading.Thread(target=torch.distributed.broadcast, args=(flat, 0), kwargs={"group": groups[0]}, daemon=True)
        sending.start()
        answer = engine.update_weights_from_distributed(
            names=[name for name, _ in named],
            dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in named],
            shapes=[list(tensor.shape) for _, tensor in named],
            group_name="weights",
            load_format="flattened_bucket",
        )
        sending.join()
        print(f"update {attempt}: {answer}, {flat.nbytes / 1e9:.2f} GB in {time.monotonic() - started:.3f} s", flush=True)
    print(f"after: {_difference(sampled, model):.3f} nats", flush=True)
    engine.shutdown()
    Path(shm_path_for(engine.port_args.instance_id)).unlink(missing_ok=True)  # it leaves it


def _ours(model: Any, scratch: Path, python: str, *, loses: bool) -> None:
    from rlbatch.api import EngineLost, Prompt, RolloutContext, SamplingParams
    from rlbatch.weights.export import buckets
    from rlbatch_plugins.rollout_sglang import SglangOptions, sglang_rollout
    from tests.leftovers import process_called

    own = {"python": python, **OPTIONS, **(GPU_OPTIONS if ON_GPU else {})}
    options = SglangOptions(transport="collective", separate_gpus=int(ON_GPU), hang_limit_s=8)
    rollout = sglang_rollout(RolloutContext(scratch / "model", DEVICE, "bfloat16", engine=own, folder=scratch / "engine"), options)
    prompts = [Prompt(number, "", tuple(prompt)) for number, prompt in enumerate(PROMPTS)]

    def sampled() -> list[tuple[list[int], list[float]]]:
        answers = rollout.generate(prompts, SamplingParams(1.0, LENGTH, (), 1, (0, 0)))
        return [(list(sample.token_ids), list(sample.logprobs)) for samples in answers for sample in samples]

    def update(version: int, midway: Callable[[], None] = lambda: None) -> None:
        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            all_of_them = list(checkpoint(model))
            yield from all_of_them[: len(all_of_them) // 2]
            midway()
            yield from all_of_them[len(all_of_them) // 2 :]

        size = sum(tensor.nbytes for _, tensor in checkpoint(model))
        started = time.monotonic()
        rollout.update_weights(buckets(tensors(), BUCKET_MIB, version))
        print(f"update {version}: {size / 1e9:.2f} GB in {time.monotonic() - started:.3f} s", flush=True)

    try:
        for version in range(UPDATES):
            update(version)
        print(f"after: {_difference(sampled, model):.3f} nats", flush=True)
        if loses:
            stop = partial(os.kill, process_called(scratch / "engine" / "site", "sglang::scheduler"), signal.SIGSTOP)
            started = time.monotonic()
            try:
                update(UPDATES, stop)
            except EngineLost as error:
                print(f"lost after {time.monotonic() - started:.1f} s: {str(error).splitlines()[0]}", flush=True)
            started = time.monotonic()
            rollout.restart()
            print(f"restarted in {time.monotonic() - started:.1f} s", flush=True)
            update(UPDATES)
            print(f"after its restart: {_difference(sampled, model):.3f} nats", flush=True)
    except BaseException:
        print((scratch / "engine" / "engine.log").read_text(errors="replace")[-2000:], flush=True)
        raise
    finally:
        rollout.close()


def _difference(sampled: Sampled, model: Any) -> float:
    """Mean difference of the samples' log-probs to transformers', nats."""
    samples, first = sampled(), len(PROMPTS[0])
    ids = torch.tensor([prompt + tokens for prompt, (tokens, _) in zip(PROMPTS, samples, strict=True)], device=DEVICE)
    with torch.no_grad():
        logprobs = model(ids).logits[:, first - 1 : -1].float().log_softmax(-1).gather(-1, ids[:, first:, None])[..., 0]
    theirs = torch.tensor([values for _, values in samples], device=DEVICE)
    return float((logprobs - theirs).abs().mean())


if __name__ == "__main__":
    main(sys.argv[1:])
