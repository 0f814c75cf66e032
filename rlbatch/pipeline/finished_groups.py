"""Keeps the groups of the running step on disk as each is generated, so that a resumed run does not generate them again.

``<run_dir>/groups/step_000012/prompt_000345.safetensors`` holds the completions of one prompt. Its key identifies how they were sampled:
the policy's weights, the sampler (``sampler_key``), the seed, the sampling settings and the prompt. A file with another key, or a damaged
one, is ignored.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import shutil
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import astuple
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from rlbatch.api import Completion, Continued, ForeignBackend, Prompt, RolloutBackend, SamplingParams
from rlbatch.config.schema import Config
from rlbatch.engines.host.inventory import software
from rlbatch.weights.quantize import SCALE_SUFFIX

FOLDER = "groups"
PROBED_VALUES = 8
"""Number of values at the beginning and at the end of each tensor by which policies are told apart."""


class WeightsProbe:
    """Tells policies apart by a few values of every tensor, taken as the weights are streamed; equal under every layout.

    An optimizer changes almost every value in every update, so a few are enough. Tensors of routed experts, which not every rank gets, are
    skipped (``passed_over``).
    """

    def __init__(self, passed_over: Container[str] = ()) -> None:
        self._passed_over = passed_over
        self._names: list[str] = []
        self._values: list[Tensor] = []

    def watch(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Passes the tensors on, and notes values of each."""
        for name, tensor in tensors:
            if name.removesuffix(SCALE_SUFFIX) in self._passed_over or not name:
                yield name, tensor
                continue
            rows = tensor if tensor.dim() else tensor[None]
            first, last = rows[(0,) * (rows.dim() - 1)][:PROBED_VALUES], rows[(-1,) * (rows.dim() - 1)][-PROBED_VALUES:]
            self._names.append(name)
            self._values += [part.to(torch.float32, copy=True) for part in (first, last)]
            yield name, tensor

    def digest(self) -> str:
        """SHA-256 of the names and noted values of all tensors so far, in hex."""
        values = torch.cat(self._values).cpu() if self._values else torch.empty(0)
        return hashlib.sha256(json.dumps(self._names).encode() + values.numpy().tobytes()).hexdigest()


class FinishedGroups:
    """Stores the finished groups of one step on disk, for one set of sampling parameters; no collectives.

    ``weights`` is the policy's ``WeightsProbe.digest``, ``sampler`` the engine's ``sampler_key``. ``announce`` is called with messages
    about files that cannot be used.
    """

    def __init__(
        self, run_dir: Path, step: int, weights: str, params: SamplingParams, sampler: str, announce: Callable[[str], None]
    ) -> None:
        self._folder = run_dir / FOLDER / f"step_{step:06d}"
        self._by = json.dumps([weights, astuple(params), sampler])
        self._announce = announce
        self._is_new = not self._folder.exists()

    def load(self, prompt: Prompt, parts: Sequence[Continued] = ()) -> list[Completion] | None:
        """The stored completions of a prompt, or of the next parts of its responses; None if they are not stored."""
        path = self._path(prompt, parts)
        if self._is_new or not path.exists():
            return None
        try:
            return self._parsed(path.read_bytes(), self._key(prompt, parts))
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            self._announce(f"{path}: ignored, the group is generated again ({error})")
            return None

    def save(self, prompt: Prompt, completions: Sequence[Completion], parts: Sequence[Continued] = ()) -> None:
        """Writes a group, whole or not at all. If the disk fails, the group only cannot be reused."""
        tokens, logprobs = (
            torch.tensor([value for completion in completions for value in getattr(completion, name)], dtype=dtype)
            for name, dtype in (("token_ids", torch.int32), ("logprobs", torch.float32))
        )
        tensors = {"token_ids": tokens, "logprobs": logprobs}
        if kept := [ids for completion in completions for ids in completion.kept or ()]:
            tensors["kept_counts"] = torch.tensor(list(map(len, kept)), dtype=torch.int32)
            tensors["kept_ids"] = torch.tensor([token for ids in kept for token in ids], dtype=torch.int32)
        if routes := [completion.routes for completion in completions if completion.routes is not None]:
            tensors["routes"] = torch.cat(routes)
            tensors["route_counts"] = torch.tensor([-1 if each.routes is None else len(each.routes) for each in completions])
        ends = json.dumps([[len(completion.token_ids), completion.finish_reason] for completion in completions])
        path = self._path(prompt, parts)
        draft = path.with_name(f".{path.name}.part")
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft.write_bytes(save(tensors, {"key": self._key(prompt, parts), "ends": ends, "digest": _digest(tensors, ends)}))
            os.replace(draft, path)
        except OSError as error:
            self._announce(f"{path}: not written, a resumed run generates the group again ({error})")

    def _parsed(self, content: bytes, key: str) -> list[Completion]:
        said = _metadata(content)
        if said["key"] != key:
            raise ValueError("it is of other weights, another engine, other settings or prompts")
        tensors = load(content)
        if said["digest"] != _digest(tensors, said["ends"]):
            raise ValueError("it is damaged")
        ends = json.loads(said["ends"])
        sizes = [int(size) for size, _ in ends]
        tokens, logprobs = ([part.tolist() for part in tensors[name].split(sizes)] for name in ("token_ids", "logprobs"))
        kept: list[list[list[int]] | None] = [None] * len(sizes)
        if "kept_counts" in tensors:
            by_token = iter(tensors["kept_ids"].split(tensors["kept_counts"].tolist()))
            kept = [[ids.tolist() for ids in islice(by_token, size)] for size in sizes]
        routes: list[Tensor | None] = [None] * len(sizes)
        if "routes" in tensors:
            counts = tensors["route_counts"]
            parts = iter(tensors["routes"].split(counts[counts >= 0].tolist()))
            routes = [next(parts) if count >= 0 else None for count in counts.tolist()]
        rows = zip(tokens, logprobs, ends, kept, routes, strict=True)
        return [Completion(ids, values, reason, kept=chosen_from, routes=of) for ids, values, (_, reason), chosen_from, of in rows]

    def _path(self, prompt: Prompt, parts: Sequence[Continued]) -> Path:
        part = "".join(f"_{number}" for number in parts[0].draw) if parts else ""
        return self._folder / f"prompt_{prompt.prompt_id:06d}{part}.safetensors"

    def _key(self, prompt: Prompt, parts: Sequence[Continued]) -> str:
        before = [(part.draw, part.token_ids) for part in parts] or ""
        return hashlib.sha256(f"{self._by} {prompt.prompt_id} {prompt.token_ids}{before}".encode()).hexdigest()


def delete_other_steps(run_dir: Path, step: int) -> None:
    """Deletes the groups of all steps but one. Only rank 0 calls this, while no rank generates."""
    for folder in (run_dir / FOLDER).glob("step_*"):
        if folder.name != f"step_{step:06d}":
            shutil.rmtree(folder, ignore_errors=True)


def sampler_key(config: Config, backend: RolloutBackend, engine_folder: Path) -> str:
    """Identifies samplers whose samples may be mixed in a step: options and precision, the backend's code and interpreter, engine files.

    Equal samplers may get different keys, which only costs time.
    """
    rollout = config.rollout
    options = [rollout.name, rollout.options, rollout.engine, rollout.quantization, config.train.precision, config.cluster.environment]
    files = [[str(path.relative_to(engine_folder)), _file_digest(path)] for path in sorted(engine_folder.rglob("*")) if path.is_file()]
    code = _file_digest(Path(inspect.getfile(type(backend)))) if hasattr(inspect.getmodule(type(backend)), "__file__") else ""
    interpreter = backend.software if isinstance(backend, ForeignBackend) else software()
    return json.dumps([options, files, code, interpreter], sort_keys=True, default=str)


def _metadata(content: bytes) -> dict[str, str]:
    """The ``__metadata__`` strings of a safetensors file, from the JSON header behind its 8 bytes of header size."""
    header: Any = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    said: dict[str, str] = header["__metadata__"]
    return said


def _digest(tensors: dict[str, Tensor], ends: str) -> str:
    return hashlib.sha256(ends.encode() + b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))).hexdigest()


def _file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
