"""One GRPO backward pass on every rank of a pool, for any layout: what comparisons of gradients run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast

import torch
import torch.distributed as dist

from rlbatch.algorithms.aggregate import denominator
from rlbatch.algorithms.objective import Objective
from rlbatch.api import KeptTokens, Routes
from rlbatch.checkpoint.hf import HfTensors
from rlbatch.config.hf_config import read_config
from rlbatch.config.schema import AlgorithmConfig, Config, CorrectionConfig, LayoutConfig, TrainConfig
from rlbatch.megatron import parallel
from rlbatch.megatron.trainer import Trainer
from rlbatch.pipeline.corrected import with_kept_ratio
from rlbatch.pipeline.packing import (
    Pack,
    assign_to_ranks,
    build_microbatches,
    pad_with_dummies,
    sequence_multiple,
    with_advantages,
)
from rlbatch.plan.layout import microbatch_count
from rlbatch.registry import Registry, load_plugins

LENGTHS = (9, 17, 5, 12, 20, 7, 3, 14, 11)
VOCAB = 61


@lru_cache(maxsize=4)
def plugins_of(names: tuple[str, ...] = ()) -> Registry:
    """The installed plugins, and those named (``plugins=[...]``)."""
    return load_plugins(names)


def samples(lengths: Sequence[int] = LENGTHS, vocab: int = VOCAB) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Token ids, loss masks (prompts of 2 tokens) and advantages of the test batch."""
    generator = torch.Generator().manual_seed(11)
    tokens = [torch.randint(0, vocab, (length,), generator=generator) for length in lengths]
    masks = [torch.cat([torch.zeros(2), torch.ones(length - 2)]) for length in lengths]
    advantages = [torch.full((length,), 1.0 - 0.3 * index) for index, length in enumerate(lengths)]
    return tokens, masks, advantages


def build_trainer(
    folder: Path, layout: LayoutConfig, plugins: tuple[str, ...] = (), algorithm: AlgorithmConfig | None = None, **train: Any
) -> Trainer:
    """A trainer on this rank with the folder's weights."""
    config = Config(layout=layout, train=TrainConfig(**train), algorithm=algorithm or AlgorithmConfig())
    parallel.initialize_groups(layout, seed=0)
    registry = plugins_of(plugins)
    trainer = Trainer(config, registry.resolve_model_family(read_config(folder)), registry.build_offload("none", {}))
    trainer.load(HfTensors(folder).read)
    return trainer


def chosen_from(tokens: torch.Tensor, vocab: int) -> KeptTokens:
    """Each token and up to six others, by position; every fourth one was chosen from the whole vocabulary."""
    rows = [
        sorted({token, *((7 * token + 11 * i + place) % vocab for i in range(place % 7))}) if place % 4 else []
        for place, token in enumerate(tokens.tolist())
    ]
    return KeptTokens(torch.tensor([token for row in rows for token in row], dtype=torch.int32), torch.tensor([len(row) for row in rows]))


def my_packs(
    layout: LayoutConfig,
    max_tokens: int,
    lengths: Sequence[int] = LENGTHS,
    vocab: int = VOCAB,
    *,
    is_truncated: bool = False,
    routes: Sequence[Routes] = (),
) -> list[Pack]:
    """This rank's microbatches of the test batch, as many as on every other rank."""
    tokens, masks, advantages = samples(lengths, vocab)
    mine = assign_to_ranks(lengths, parallel.dp_size())[parallel.dp_rank()]
    multiple = sequence_multiple(layout.tp_size, layout.cp_size)
    packs = build_microbatches(
        [tokens[i] for i in mine],
        [masks[i] for i in mine],
        [torch.zeros(lengths[i]) for i in mine],
        max_tokens=max_tokens * layout.cp_size,
        pad_multiple=multiple,
        kept=[chosen_from(tokens[i], vocab) for i in mine] if is_truncated else (),
        routes=[routes[i] for i in mine] if routes else (),
    )
    count = torch.tensor(len(packs))
    dist.all_reduce(count, dist.ReduceOp.MAX)
    return pad_with_dummies(with_advantages(packs, [advantages[i] for i in mine]), microbatch_count(layout, int(count)), multiple)


def gradients(
    folder: str,
    layout: LayoutConfig,
    max_tokens: int,
    aggregation: str,
    loss: str = "clip",
    correction: CorrectionConfig | None = None,
    is_truncated: bool = False,
    **train: Any,
) -> dict[str, torch.Tensor]:
    """Gradient of a policy loss with KL and entropy terms by Hugging Face name, and the loss as ``loss``; rank 0 only.

    With a correction the engine's log-probs are up to 0.4 nats off, by the token.
    """
    return gradients_of(
        build_trainer(Path(folder), layout, **train),
        my_packs(layout, max_tokens, is_truncated=is_truncated),
        aggregation,
        loss,
        correction=correction,
    )


def gradients_of(trainer: Trainer, packs: list[Pack], aggregation: str, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
    """The same for a trainer that exists; arguments as of ``backward``."""
    loss = backward(trainer, packs, aggregation, *args, **kwargs)
    named = {name: grad.clone() for name, grad in trainer.export_gradients()}
    named["loss"] = torch.tensor(loss)
    return named if dist.get_rank() == 0 else {}


def backward(
    trainer: Trainer,
    packs: list[Pack],
    aggregation: str,
    loss: str = "clip",
    options: Mapping[str, Any] = MappingProxyType({}),
    correction: CorrectionConfig | None = None,
    old: Literal["moved", "before", "own"] = "moved",
) -> float:
    """Leaves the gradients in the trainer, and returns the loss.

    Old log-probs are another policy's, or the trainer's: by a pass before the update, or its own.
    """
    algorithm = AlgorithmConfig(
        loss=loss, loss_aggregation=cast(Any, aggregation), loss_options=options, kl_loss=True, kl_loss_coef=0.3, entropy_coef=0.1
    )
    objective = Objective(algorithm, plugins_of().build_loss(algorithm), correction or CorrectionConfig())
    batches = [pack.microbatch for pack in packs]
    for batch, values in zip(batches, trainer.logprobs(batches), strict=True):
        before = values - 0.05 * batch.loss_mask if old == "moved" else values
        batch.old_logprobs = None if old == "own" else before
        batch.ref_logprobs, batch.rollout_logprobs = 0.9 * values, 0.95 * values
        if correction is not None:
            batch.rollout_logprobs = before + 0.4 * (3.0 * batch.token_ids + 1.0).sin() * batch.loss_mask
    objective = with_kept_ratio(objective, batches)
    total = torch.tensor(sum(denominator(b.loss_mask, b.cu_seqlens, aggregation, 7.0) for b in batches))
    dist.all_reduce(total, group=parallel.dp_group())
    return float(trainer.backward(batches, objective, float(total))["loss"])


def gradients_of_each(
    folder: str,
    layout: LayoutConfig,
    max_tokens: int,
    cases: Sequence[tuple[str, str, Mapping[str, Any], CorrectionConfig | None]],
    old: Sequence[Literal["moved", "before", "own"]] = ("moved",),
) -> list[dict[str, torch.Tensor]]:
    """``gradients`` for several losses: aggregation, name and options of each, and its correction; with each kind of old log-probs."""
    trainer, packs = build_trainer(Path(folder), layout), my_packs(layout, max_tokens)
    return [gradients_of(trainer, packs, *case, kind) for case in cases for kind in old]


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """L2 norm of the difference over the norm of the reference."""
    return float((got - want).norm() / want.norm().clamp(min=1e-12))


def worst(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest relative error and its parameter."""
    assert set(got) == set(want)
    return max((relative_error(got[name], want[name]), name) for name in want)
