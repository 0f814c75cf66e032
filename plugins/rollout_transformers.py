"""Generation by Hugging Face transformers inside each rank: slow, but everywhere, and the oracle for the other engines.

A sample depends on (run seed, step, prompt id, sample index) and the weights alone: its random numbers come from a generator of its
own. In fp32 that makes it the same on whatever rank and in whatever batch it is generated, up to rounding.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlbatch.api import (
    Completion,
    Count,
    EngineShape,
    Prompt,
    RolloutContext,
    RolloutError,
    RolloutSpec,
    SamplingParams,
    WeightBucket,
    draw_key,
    hookimpl,
)
from rlbatch.api.values import option

if TYPE_CHECKING:
    from torch import Tensor

INITIAL_SEED = 2**62 + 1


@dataclass(frozen=True)
class TransformersOptions:
    """``rollout.options.*``"""

    max_batch_size: Count = option(512, "Samples generated at once on a rank.")


@hookimpl
def rlbatch_register_rollout_backends() -> Mapping[str, RolloutSpec]:
    """Offers ``rollout=transformers``."""
    return {
        "transformers": RolloutSpec(
            TransformersRollout,
            TransformersOptions,
            engine_shape=engine_shape,
            returns_kept_tokens=True,
            continues=True,
            returns_routes=True,
        )
    }


def engine_shape(options: TransformersOptions, engine: Mapping[str, Any]) -> EngineShape:
    """See ``RolloutSpec``: the model stays on the rank's device."""
    return EngineShape(asleep="gpu")


class TransformersRollout:
    """A ``RolloutBackend`` that holds a whole model on this rank."""

    def __init__(self, context: RolloutContext, options: TransformersOptions) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        self._device, self._batch = torch.device(context.device), options.max_batch_size
        config = AutoConfig.from_pretrained(context.hf_folder, local_files_only=True)
        # The random weights made here are overwritten by the first sync, and must not disturb the trainer's random numbers.
        # Their seed is no run's: if they were the policy's first weights, a sync that never came would go unnoticed.
        with torch.random.fork_rng(devices=[]), self._device:
            torch.manual_seed(INITIAL_SEED)
            self._model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, context.dtype)).eval()
        self._targets = _checkpoint_views(self._model)
        self._routes = _Routes(self._model)
        # transformers 5.2x renamed the argument and warns at every use of the old name.
        known = inspect.signature(self._model.forward).parameters
        self._cache_argument = "cache" if "cache" in known else "past_key_values"

    def update_weights(self, buckets: Iterable[WeightBucket]) -> None:
        """Writes every tensor into the model; see ``RolloutBackend``."""
        import torch

        written: set[str] = set()
        with torch.no_grad():
            for bucket in buckets:
                for name, tensor in zip(bucket.names, bucket.tensors, strict=True):
                    if name not in self._targets or name in written:
                        raise RolloutError(
                            f"weight sync: {name} is {'written twice' if name in written else 'no parameter of the engine'}."
                        )
                    target = self._targets[name]
                    if tensor.shape != target.shape:  # copy_ would broadcast
                        raise RolloutError(f"weight sync: {name} has shape {list(tensor.shape)}, the engine's has {list(target.shape)}.")
                    target.copy_(tensor)
                    written.add(name)
        if missing := sorted(set(self._targets) - written):
            raise RolloutError(f"weight sync: {len(missing)} parameters of the engine were not written, first {missing[0]}.")

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams) -> Iterator[list[Completion]]:
        """Samples in batches of whole prompts, and yields after each batch; see ``RolloutBackend``."""
        per_prompt = params.samples_per_prompt
        per_batch = max(1, self._batch // per_prompt)
        for first in range(0, len(prompts), per_batch):
            wanted = [(prompt, index) for prompt in prompts[first : first + per_batch] for index in range(per_prompt)]
            done: list[Completion] = []
            for start in range(0, len(wanted), self._batch):
                done += self._generate_batch(wanted[start : start + self._batch], params)
            yield from (done[start : start + per_prompt] for start in range(0, len(done), per_prompt))

    def _generate_batch(self, wanted: Sequence[tuple[Prompt, int]], params: SamplingParams) -> list[Completion]:
        import torch

        draws = _uniforms(wanted, params).to(self._device)
        tokens, mask = _left_padded([prompt.token_ids for prompt, _ in wanted], self._device)
        stops = torch.tensor(params.stop_token_ids, dtype=torch.int64, device=self._device)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        alive = torch.ones(len(wanted), dtype=torch.bool, device=self._device)
        chosen, logprobs, keeps, ends, cache = [], [], [], [], None
        started = time.perf_counter()
        self._routes.begin(is_kept=params.with_routes)
        with torch.inference_mode():
            for step in range(params.max_response_tokens):
                options = {self._cache_argument: cache, "use_cache": True, "logits_to_keep": 1}
                output = self._model(input_ids=tokens, attention_mask=mask, position_ids=positions, **options)
                cache = output[self._cache_argument]
                logits = output.logits[:, -1].float() / (params.temperature or 1.0)
                if params.is_truncated:
                    kept = kept_tokens(logits, params.top_p, params.top_k)
                    logits = logits.masked_fill(~kept, -torch.inf)
                    keeps.append(kept.cpu())
                token, logprob = _sample(logits, params.temperature == 0, draws[:, step])
                chosen.append(torch.where(alive, token, -1))
                logprobs.append(logprob)
                alive = alive & ~torch.isin(token, stops)
                is_over = not alive.any()
                ends.append(time.perf_counter() - started)
                if is_over:
                    break
                tokens, positions = token.unsqueeze(-1), positions[:, -1:] + 1
                mask = torch.cat([mask, mask.new_ones(len(wanted), 1)], dim=-1)
        rows = zip(torch.stack(chosen, 1).tolist(), torch.stack(logprobs, 1).tolist(), (~alive).tolist(), strict=True)
        routes = self._routes.of([len(prompt.token_ids) for prompt, _ in wanted])
        return [
            _completion(ids, values, stopped, ends, [kept[row] for kept in keeps], routes[row])
            for row, (ids, values, stopped) in enumerate(rows)
        ]

    def close(self) -> None:
        """Drops the model."""
        del self._model, self._targets, self._routes


class _Routes:
    """The experts that each token of a batch goes to, taken from what each layer's experts are called with."""

    def __init__(self, model: Any) -> None:
        self._is_kept = False
        self._steps: list[list[Tensor]] = []
        # transformers calls whatever holds stacked experts with tokens, their experts, and weights.
        self._layers = [module for module in model.modules() if hasattr(module, "gate_up_proj") and hasattr(module, "num_experts")]
        model.register_forward_pre_hook(self._next_step)
        for module in self._layers:
            module.register_forward_pre_hook(self._take)

    def begin(self, *, is_kept: bool) -> None:
        """Forgets the last batch, before a new one whose routes are kept if ``is_kept``."""
        self._is_kept, self._steps = is_kept, []

    def _next_step(self, model: Any, args: Any) -> None:
        if self._is_kept:
            self._steps.append([])

    def _take(self, module: Any, args: tuple[Tensor, ...]) -> None:
        import torch

        if self._is_kept:
            self._steps[-1].append(args[1].to("cpu", torch.int16))

    def of(self, prompts: Sequence[int]) -> list[Tensor | None]:
        """The experts of each row of the batch, [its prompt's tokens + steps - 1, layers, K] int16; None for each if they were not kept.

        Args:
            prompts: Tokens of each prompt; they were padded on the left to the longest.
        """
        import torch

        if not self._is_kept:
            return [None] * len(prompts)
        steps = [torch.stack(layers, 1).unflatten(0, (len(prompts), -1)) for layers in self._steps]
        rows = torch.cat(steps, 1)
        return [row[max(prompts) - tokens :] for row, tokens in zip(rows, prompts, strict=True)]


def _checkpoint_views(model: Any) -> dict[str, Tensor]:
    """Checkpoint name -> where it lies in the model, which stacks the experts that checkpoints hold one by one.

    Of buffers, those that checkpoints have, e.g. a router's score correction. transformers itself names the parts: it converts a tag in the
    place of each.
    """
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    stored = model.state_dict().keys()
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in stored]
    places: list[Tensor] = []
    tags: dict[str, Tensor] = {}
    for name, param in [*model.named_parameters(), *buffers]:
        leaf = name.rpartition(".")[2]
        if leaf == "gate_up_proj":
            parts, shape = [half for expert in param.detach() for half in expert.chunk(2, 0)], (len(param), 2, 1)
        elif leaf == "down_proj":
            parts, shape = list(param.detach()), (len(param), 1, 1)
        else:
            parts, shape = [param.detach()], (1, 1, 1)
        tags[name] = torch.arange(len(places), len(places) + len(parts)).view(shape)
        places += parts
    return {name: places[int(tag)] for name, tag in revert_weight_conversion(model, tags).items()}


def _uniforms(wanted: Sequence[tuple[Prompt, int]], params: SamplingParams) -> Tensor:
    """[samples, max_response_tokens] float64 in [0, 1), each row from the sample's own generator."""
    import numpy as np
    import torch

    rows = [np.random.default_rng(draw_key(params, prompt, index)).random(params.max_response_tokens) for prompt, index in wanted]
    return torch.from_numpy(np.stack(rows))


def _left_padded(rows: Sequence[Sequence[int]], device: Any) -> tuple[Tensor, Tensor]:
    """[rows, longest] int64 token ids, padded on the left, and 1 where they are real."""
    import torch

    longest = max(len(row) for row in rows)
    tokens = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
    return tokens, mask


def kept_tokens(logits: Tensor, top_p: float, top_k: int) -> Tensor:
    """Tokens that may be chosen; see ``SamplingParams``. Of equally likely ones those with lower ids come first.

    Args:
        logits: [B, V], at the sampling temperature.
        top_p: Sum of their probabilities.
        top_k: Their number; 0: any.

    Returns:
        [B, V] bool.
    """
    import torch

    order = logits.sort(dim=-1, descending=True, stable=True)
    is_kept = torch.ones_like(order.values, dtype=torch.bool)
    if top_k:
        is_kept[:, top_k:] = False
    if top_p < 1:
        probabilities = order.values.double().masked_fill(~is_kept, -torch.inf).softmax(-1)
        is_kept &= probabilities.cumsum(-1) - probabilities < top_p
    return torch.zeros_like(is_kept).scatter(-1, order.indices, is_kept)


def _sample(logits: Tensor, is_greedy: bool, draws: Tensor) -> tuple[Tensor, Tensor]:
    """[B, V] logits -> [B] tokens by inversion of the cumulative distribution, and [B] their log-probs; or the most likely ones."""
    import torch

    logprobs = logits.log_softmax(-1)
    if is_greedy:
        tokens = logits.argmax(-1)
    else:
        cumulative = logprobs.double().exp().cumsum(-1)
        tokens = torch.searchsorted(cumulative, (draws * cumulative[:, -1]).unsqueeze(-1), right=True).squeeze(-1)
        tokens = tokens.clamp(max=logits.shape[-1] - 1)
    return tokens, logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def _completion(
    ids: list[int], logprobs: list[float], stopped: bool, ends: list[float], keeps: Sequence[Tensor], routes: Tensor | None
) -> Completion:
    length = ids.index(-1) if -1 in ids else len(ids)
    routes = None if routes is None else routes[: len(routes) - len(ids) + length]
    kept = [row.nonzero().flatten().tolist() for row in keeps[:length]] or None
    return Completion(ids[:length], logprobs[:length], "stop" if stopped else "length", seconds=ends[length - 1], kept=kept, routes=routes)
