"""SGLang's own update over NCCL, for comparison: `python -m tests.gpu.sglang_nccl`, with SGLang's environment, on two GPUs.

A bare ``sglang.Engine`` on the second GPU, weights broadcast by this process from the first: ``init_weights_update_group`` and
``update_weights_from_distributed``. Prints seconds, and the log-probs' mean difference to transformers before and after.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from tests.gpu.vllm_run import SHAPE, _checkpoint

PORT = 29611


def main() -> None:
    """Runs the script."""
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.utils import init_custom_process_group
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    with tempfile.TemporaryDirectory() as scratch:
        config = Qwen3MoeConfig(**SHAPE, num_hidden_layers=8)
        config.architectures = ["Qwen3MoeForCausalLM"]
        config.save_pretrained(Path(scratch))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda().eval()
        engine = Engine(
            model_path=scratch,
            skip_tokenizer_init=True,
            load_format="dummy",
            base_gpu_id=1,
            grammar_backend="none",
            attention_backend="fa3",
            sampling_backend="pytorch",
            disable_prefill_cuda_graph=True,
            disable_cuda_graph=True,
            mem_fraction_static=0.4,
            context_length=2048,
        )
        print(f"before: {_difference(engine, model):.3f} nats", flush=True)
        groups: list[Any] = []
        meet = {"backend": "nccl", "world_size": 2, "group_name": "weights"}
        joining = threading.Thread(
            target=lambda: groups.append(init_custom_process_group(init_method=f"tcp://127.0.0.1:{PORT}", rank=0, **meet))
        )
        joining.start()
        print("join:", engine.init_weights_update_group(master_address="127.0.0.1", master_port=PORT, rank_offset=1, **meet), flush=True)
        joining.join()
        for attempt in range(3):
            named = [(name, tensor.contiguous()) for name, tensor in _checkpoint(model)]
            flat = FlattenedTensorBucket(named_tensors=named).get_flattened_tensor()
            started = time.monotonic()
            sending = threading.Thread(target=torch.distributed.broadcast, args=(flat, 0), kwargs={"group": groups[0]})
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
        print(f"after: {_difference(engine, model):.3f} nats", flush=True)
        engine.shutdown()


def _difference(engine: Any, model: Any) -> float:
    prompts = [list(range(10 + i, 74 + i)) for i in range(8)]
    params = {"temperature": 1.0, "max_new_tokens": 64, "ignore_eos": True}
    outputs = engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True)
    ids = torch.tensor([prompt + output["output_ids"] for prompt, output in zip(prompts, outputs, strict=True)], device="cuda")
    with torch.no_grad():
        logprobs = model(ids).logits[:, 63:-1].float().log_softmax(-1).gather(-1, ids[:, 64:, None])[..., 0]
    theirs = torch.tensor([[value for value, _, _ in output["meta_info"]["output_token_logprobs"]] for output in outputs], device="cuda")
    return float((logprobs - theirs).abs().mean())


if __name__ == "__main__":
    sys.exit(main())
