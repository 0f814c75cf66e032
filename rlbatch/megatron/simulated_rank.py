"""Simulates a rank of any layout in one process: process groups without peers, and modules on the meta device, which take no memory."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from rlbatch.api import ModelFamily
from rlbatch.config.schema import LayoutConfig
from rlbatch.megatron import parallel
from rlbatch.megatron.model import PolicyModel, build_model, transformer_config


@contextmanager
def simulated_rank(layout: LayoutConfig, rank: int, ranks_per_node: int = 1) -> Iterator[None]:
    """Context with the groups as this rank of the layout sees them, Megatron's and those of a node. No process group may exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=layout.world_size, store=FakeStore())
    try:
        with _only_groups_of(rank):
            parallel.initialize_groups(layout, seed=0, ranks_per_node=ranks_per_node)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@contextmanager
def _only_groups_of(rank: int) -> Iterator[None]:
    """Context that skips creating groups without this rank, thousands in a large layout, for which torch only says that it is no member."""
    new_group = dist.new_group

    def new_own_group(ranks: Sequence[int], **options: Any) -> Any:
        return new_group(ranks, **options) if rank in ranks else dist.GroupMember.NON_GROUP_MEMBER

    dist.new_group = new_own_group
    try:
        yield
    finally:
        dist.new_group = new_group


@contextmanager
def on_meta() -> Iterator[None]:
    """Context in which every new tensor is on the meta device, and nothing is printed."""
    with _OnMeta(), contextlib.redirect_stdout(None), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class _OnMeta(TorchFunctionMode):
    """Creates tensors on the meta device even where the code names another one."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function in _device_constructors():
            kwargs["device"] = "meta"
        return function(*args, **kwargs)


def stages(family: ModelFamily, layout: LayoutConfig) -> list[PolicyModel]:
    """Model chunks of the simulated rank, in bf16; to be called and used within ``on_meta``."""
    return build_model(transformer_config(family, layout, "bf16"), family)
