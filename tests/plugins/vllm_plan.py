"""Run by vLLM's interpreter: syncs of one worker with and without the recorded plan, as JSON on the last line.

`python -m tests.plugins.vllm_plan FOLDER`. Layers keep their weights as they are loaded, as on GPUs with the kernels that do so: vLLM's CPU
backend packs most of them, and then there is little to plan.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.reload import meta
from vllm.model_executor.utils import replace_parameter

from rlbatch_plugins.vllm_host.plugin import register
from rlbatch_plugins.vllm_host.weight_transfer import SharedMemoryTransfer
from rlbatch_plugins.vllm_host.write_audit import check_values

Named = Sequence[tuple[str, torch.Tensor]]


def keep(self: Any, layer: Any) -> None:
    """In place of vLLM's processing."""
    layer.cpu_linear = torch.nn.functional.linear


def keep_experts(self: Any, layer: Any) -> None:
    """In place of vLLM's processing, what it does for the Triton kernels (`_setup_kernel`): it puts parameters where they are."""
    for name in ("w13_weight", "w2_weight"):
        parameter = getattr(layer, name)
        parameter.data = parameter.data
        replace_parameter(layer, name, parameter.contiguous(), prefer_copy=hasattr(self, "was_asked"))
    self.was_asked = True


def width(layer: Any) -> int:
    """Of what a layer takes."""
    return int(layer.input_size if isinstance(layer, LinearBase) else layer.embedding_dim)


class Worker:
    """A model and its transfer, which gets tensors as they are."""

    def __init__(self, folder: Path) -> None:
        arguments = EngineArgs(model=str(folder), skip_tokenizer_init=True, load_format="dummy", dtype="float32", enforce_eager=True)
        config = arguments.create_engine_config()
        with set_current_vllm_config(config):
            init_distributed_environment(1, 0, f"file://{folder}/join", 0, "gloo")
            initialize_model_parallel(1, 1)
            torch.accelerator.empty_cache = lambda: None  # there is none
            self.model = get_model(vllm_config=config)
        self.transfer = SharedMemoryTransfer(config.weight_transfer_config, config, torch.device("cpu"), self.model)
        self.receiver = SimpleNamespace(tensors=lambda devices: devices, finish=lambda: None, lasting=frozenset(), all_last=False)
        self.transfer.receiver = self.receiver  # type: ignore[assignment]

    def sync(self, calls: Sequence[Named], *, replay: bool, lent: bool = False) -> str:
        """One update, with tensors that last until it is over or whose memory is written again; returns what is wrong with it."""
        self.receiver.lasting = frozenset(name for tensors in calls for name, _ in tensors) if lent else frozenset()
        self.transfer.start_weight_update()
        try:
            for tensors in calls:
                sent = tensors if lent or replay else [(name, tensor.clone()) for name, tensor in tensors]
                key = " ".join(f"{name} {tensor.data_ptr()}" for name, tensor in sent)
                self.transfer.update_weights({"devices": (key, sent), "replay": replay, "check": True})
                for _, tensor in sent if sent is not tensors else ():
                    tensor.fill_(3.0)
            self.transfer.finish_weight_update()
        except ValueError as error:
            return str(error)
        return ""

    def state(self) -> dict[str, torch.Tensor]:
        """Everything that the model computes with, and what it derives from weights."""
        derived = {
            f"{name}.{key}": value
            for name, module in self.model.named_modules()
            for key, value in vars(module).items()
            if isinstance(value, torch.Tensor)
        }
        computed = {
            f"{name}()": module.quant_method.apply(module, torch.linspace(-1, 1, width(module))[None], module.bias)
            for name, module in self.model.named_modules()
            if isinstance(module, (LinearBase, ParallelLMHead))
        }
        return {name: tensor.detach().clone() for name, tensor in {**self.model.state_dict(), **derived, **computed}.items()}


def count_made() -> list[int]:
    """Elements of each tensor that vLLM makes beside an old one, from here on."""
    made: list[int] = []
    make = meta.materialize_meta_tensor

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        made.append(tensor.numel())
        return make(tensor)

    meta.materialize_meta_tensor = counted
    return made


def calls(weights: dict[str, torch.Tensor], size: int) -> list[Named]:
    """Weights in calls of so many tensors."""
    named = list(weights.items())
    return [named[start : start + size] for start in range(0, len(named), size)]


def different(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are not equal bit by bit."""
    return sorted(name for name in first.keys() | second.keys() if not torch.equal(first[name], second[name]))


def held_with(worker: Worker, changed: Sequence[torch.Tensor], change: Callable[[], None]) -> list[Any]:
    """What the worker says that its modules hold after a change of some tensors, which is undone."""
    before = [tensor.clone() for tensor in changed]
    change()
    told = worker.transfer.held()
    for tensor, values in zip(changed, before, strict=True):
        tensor.copy_(values)
    return told


def add_one_bit(values: torch.Tensor) -> None:
    """In the last place of one value."""
    values.flatten().view(torch.int32)[7] ^= 1


def wrong_weights(worker: Worker, older: dict[str, torch.Tensor]) -> dict[str, list[Any]]:
    """What the worker says that its modules hold, of right weights and with parts of others."""
    found = {"right": worker.transfer.held()}
    named = {name: parameter.data for name, parameter in worker.model.named_parameters()}
    norm, embedding = named["model.layers.1.input_layernorm.weight"], named["model.embed_tokens.weight"]
    found["norm"] = held_with(worker, [norm], lambda: add_one_bit(norm))
    found["embedding"] = held_with(worker, [embedding], lambda: add_one_bit(embedding))
    experts = [values for name, values in named.items() if ".1.mlp." in name and name.endswith("w13_weight")]
    for values in experts:
        order = [1, 0, *range(2, len(values))]
        found["expert"] = held_with(worker, [values], partial(add_one_bit, values[3]))
        found["permuted"] = held_with(worker, [values], partial(values.copy_, values[order]))
    layer, stale = worker.model.model.layers[1].self_attn.o_proj, older["model.layers.1.self_attn.o_proj.weight"]
    if layer.weight.numel():
        found["stale"] = held_with(worker, [layer.weight.data], partial(layer.weight.data.copy_, stale))
    else:
        multiply = layer.cpu_linear
        layer.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, stale, bias)
        found["stale"] = worker.transfer.held()
        layer.cpu_linear = multiply
    return found


def main(folder: Path) -> None:
    """Records, replays with other weights, and compares with vLLM's way."""
    said: dict[str, Any] = {}
    weights = load_file(folder / "model.safetensors")
    others = [{name: tensor + 0.01 * torch.randn_like(tensor) for name, tensor in weights.items()} for _ in range(2)]
    if "packed" not in sys.argv:
        UnquantizedLinearMethod.process_weights_after_loading = keep
        UnquantizedFusedMoEMethod.process_weights_after_loading = keep_experts
        UnquantizedEmbeddingMethod.process_weights_after_loading = keep
    register()
    worker = Worker(folder)
    made = count_made()
    lent = {name: tensor.clone() for name, tensor in weights.items()}
    said["recorded"] = worker.sync(calls(lent, 7), replay=False, lent=True)
    said["made"] = sum(made) / sum(p.numel() for p in worker.model.parameters())
    said["changed"] = different(lent, weights)
    said["kept"] = [name for name, p in worker.model.named_parameters() for tensor in lent.values() if p.data_ptr() == tensor.data_ptr()]
    plan = worker.transfer._plan
    assert plan is not None, said
    said["loaded"] = sorted(plan.loaded)
    said["slow"] = sorted({type(layer).__name__ for layer in plan.layers})
    said["planned"] = sum(each.parameter.numel() for each in plan.parameters) / sum(p.numel() for p in worker.model.parameters())
    for number, other in enumerate(others):
        for tensor in worker.model.parameters():
            tensor.data.fill_(7.0)  # as after sleep level 2: nothing may be left from before
        said[f"replayed {number}"] = worker.sync(calls(other, 7), replay=True)
        replayed = worker.state()
        said[f"plan was used {number}"] = worker.transfer._plan is plan
        for tensor in worker.model.parameters():
            tensor.data.fill_(7.0)
        said[f"loaded {number}"] = worker.sync(calls(other, 3), replay=False)
        said[f"different {number}"] = different(replayed, worker.state())
        worker.transfer._plan = plan
    first = next(iter(weights))
    load = type(worker.model).load_weights
    type(worker.model).load_weights = lambda self, named: load(self, ((name, tensor.add_(1)) for name, tensor in named))
    said["written"] = worker.sync(calls(lent, 100), replay=False, lent=True)
    said["not written"] = different(lent, weights)
    stolen: list[torch.Tensor] = []
    type(worker.model).load_weights = lambda self, named: load(self, ((name, stolen.append(tensor) or tensor) for name, tensor in named))
    said["stolen"] = worker.sync(calls(weights, 100), replay=False)
    said["stolen and lasting"] = worker.sync(calls(lent, 100), replay=False, lent=True)
    type(worker.model).load_weights = load
    worker.sync(calls(weights, 100), replay=False)
    worker.transfer._plan = plan
    wrong = {
        "twice": [*weights.items(), (first, weights[first])],
        "unknown": [*weights.items(), ("model.extra.weight", torch.zeros(1))],
        "missing": list(weights.items())[1:],
        "shape": [(first, weights[first][:1]), *list(weights.items())[1:]],
    }
    for name, named in wrong.items():
        said[name] = worker.sync([named], replay=True)
    values = {"a.weight": torch.tensor([1.0, -2.0]), "b.weight_scale_inv": torch.tensor([0.5]), "n": torch.ones(2, dtype=torch.int32)}
    changes = {
        "fine": {"c": torch.tensor([448.0, -448.0]).to(torch.float8_e4m3fn)},
        "not a number": {"a.weight": torch.tensor([1.0, torch.nan, 3.0], dtype=torch.bfloat16)},
        "infinite": {"a.weight": torch.tensor([[-torch.inf]])},
        "eight bits": {"c": torch.tensor([1.0, torch.nan]).to(torch.float8_e4m3fn)},
        "scale": {"b.weight_scale_inv": torch.tensor([0.5, 0.0])},
    }
    for name, change in changes.items():
        try:
            said[name] = check_values({**values, **change}.items())
        except ValueError as error:
            said[name] = str(error)
    said["again"] = worker.sync(calls(weights, 7), replay=True)
    said["held"] = wrong_weights(worker, others[1])
    print(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
