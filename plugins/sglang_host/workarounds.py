"""Changes to SGLang's functions, and the registry of its faults that we work around by them, each until a release without it.

What SGLang lacks for us, without being wrong, is the table of ``plugin``.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import shared_memory
from typing import Any

from rlbatch.engines.host.workarounds import Workaround, apply_those_for, bind_stores

from .pairs import Pairs

SKIPPED = "RLBATCH_SGLANG_SKIPPED_WORKAROUNDS"
"""Variable with the names of workarounds that are not applied."""
_targets: list[str] = []


@dataclass(frozen=True)
class Hook:
    """One change to a function; SGLang makes them when it starts, in each of its processes.

    Attributes:
        target: What is changed, by its full name in SGLang.
        kind: ``AROUND`` (called with the original), ``AFTER`` (with its result) or ``REPLACE``.
        function: Ours.
        why: What is otherwise; of a workaround its symptom says that.
    """

    target: str
    kind: str
    function: Callable[..., Any]
    why: str = ""

    def register(self) -> None:
        """Names the change to SGLang, which makes it later."""
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        _targets.append(self.target)
        HookRegistry.register(self.target, self.function, HookType[self.kind])


def missing() -> list[str]:
    """Targets of this process that SGLang does not have. (It only logs that.)"""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return [target for target in _targets if target not in HookRegistry._patched]


def seeded_draws() -> None:
    """Lets tokens be drawn by inversion of the cumulative distribution, alike in every batch; see ``sampling``."""
    Hook("sglang.srt.layers.sampler.sampling_from_probs_torch", "REPLACE", _draw).register()
    Hook("sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch", "REPLACE", _draw_filtered).register()


def _draw(probs: Any, sampling_seed: Any = None, positions: Any = None) -> Any:
    from .sampling import draw_tokens

    return draw_tokens(probs, sampling_seed, positions)


def _draw_filtered(probs: Any, top_ks: Any, top_ps: Any, min_ps: Any, need_min_p: bool, sampling_seed: Any, positions: Any) -> Any:
    """Draws with ``top_p`` and ``top_k``; ``min_p`` is ignored, as nobody asks for it."""
    from .sampling import draw_among

    return draw_among(probs, top_ks, top_ps, sampling_seed, positions)


def halves_wait_for_each_other() -> None:
    """Keeps a tensor until the one has come that it is loaded with; see ``pairs``."""
    Pairs.waits = True


def private_load_file() -> None:
    """A file that SGLang's processes share is among the engine's temporary files, which go with it."""
    Hook("sglang.srt.managers.load_snapshot.shm_path_for", "REPLACE", _private_path).register()


def _private_path(name: str) -> str:
    return os.path.join(tempfile.gettempdir(), f"loads_{os.path.basename(name)}")


def named_shared_memory() -> None:
    """Shared memory has Python's own names, which are those of the engine's host; see ``name_shared_memory``."""
    Hook("sglang.srt.utils.stale_shm_cleanup.make_shm_name", "REPLACE", _shared_name).register()


def _shared_name(kind: str) -> str:
    name: str = vars(shared_memory)["_make_filename"]()
    return name.lstrip("/")


def stores_at_their_address() -> None:
    """torch's store listens at all addresses of the machine, whichever it is told."""
    bind_stores()


_TRIED = (0, 5, 15)


def _of_tried(apply: Callable[[], None], symptom: str, link: str) -> Workaround:
    return Workaround(apply, _TRIED, _TRIED, symptom, link)


_SOURCE = "https://github.com/sgl-project/sglang/blob/v0.5.15.post1/python/sglang/srt"

WORKAROUNDS = (
    _of_tried(
        seeded_draws,
        "a sample with a seed takes a token however unlikely once in 29,000 tokens (of a vocabulary of 150,000), and other tokens while a "
        "greedy request is in its batch",
        "https://github.com/sgl-project/sglang/issues/25106 and https://github.com/sgl-project/sglang/pull/35697",
    ),
    _of_tried(
        halves_wait_for_each_other,
        "DeepSeek models keep old attention weights where q_a_proj and kv_a_proj_with_mqa come in different calls",
        "https://github.com/sgl-project/sglang/pull/38298",
    ),
    _of_tried(
        private_load_file,
        "every engine leaves a file sglang_loads_* in /dev/shm, also when it ends well",
        f"{_SOURCE}/managers/load_snapshot.py#L361",
    ),
    _of_tried(
        named_shared_memory,
        "a tensor-parallel engine that is killed leaves memory sgl_shm_* in /dev/shm, which nobody removes",
        "https://github.com/sgl-project/sglang/issues/40723",
    ),
    _of_tried(
        stores_at_their_address,
        "the stores at which SGLang's processes meet listen at all addresses of the machine",
        "https://github.com/pytorch/pytorch/blob/main/torch/csrc/distributed/c10d/TCPStoreLibUvBackend.cpp",
    ),
)

_applied: set[str] = set()


def apply_all(version: str) -> None:
    """Applies, once in a process, what this version needs; warns of those that were made for other versions."""
    release = tuple(int(number) for number in re.findall(r"\d+", version)[: len(_TRIED)])
    apply_those_for(f"SGLang {version}", release, WORKAROUNDS, SKIPPED, _applied, logging.getLogger("sglang.rlbatch").warning)
