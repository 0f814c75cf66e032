"""Hugging Face folders: reading tensors one by one, writing a checkpoint in bounded files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlbatch.api import DataError

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9


class HfTensors:
    """The tensors of a Hugging Face folder, read from disk when asked for.

    Args:
        folder: Folder with one or more safetensors files.

    Raises:
        DataError: no safetensors, or an unreadable one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise DataError(f"{folder}: no *.safetensors in it. Download the weights, or convert them to safetensors.")
        self._where = {name: path.name for path in files for name in self._open(path.name).keys()}  # noqa: SIM118 (not a dict)

    def names(self) -> list[str]:
        """All tensor names."""
        return list(self._where)

    def read(self, name: str) -> Tensor:
        """One full tensor, on the host.

        Raises:
            DataError: no such tensor.
        """
        if name not in self._where:
            raise DataError(f"{self._folder}: no tensor {name}. The folder is incomplete, or config.json is another model's.")
        tensor: Tensor = self._open(self._where[name]).get_tensor(name)
        return tensor

    def _open(self, file: str) -> Any:
        if file not in self._files:
            try:
                self._files[file] = safe_open(self._folder / file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise DataError(f"{self._folder / file}: cannot be read ({error}). Download it again.") from error
        return self._files[file]


class HfWriter:
    """Writes a Hugging Face folder file by file; ``write`` takes tensors in any order, ``close`` makes the folder complete.

    Args:
        folder: Folder to make.
        like: Folder whose config.json and tokenizer files are copied.
        shard_bytes: Limit of a file.
    """

    def __init__(self, folder: Path, like: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder, self._like, self._limit = folder, like, shard_bytes
        self._held: dict[str, Tensor] = {}
        self._written: list[list[str]] = []
        self._held_bytes = self._total_bytes = 0
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Takes tensors (copied) and writes a file whenever ``shard_bytes`` have come together."""
        for name, tensor in tensors:
            if self._held and self._held_bytes + tensor.nbytes > self._limit:
                self._flush()
            self._held_bytes += tensor.nbytes
            self._held[name] = tensor.detach().to("cpu", copy=True).contiguous()

    def _flush(self) -> None:
        save_file(self._held, self._folder / f"part-{len(self._written) + 1}.safetensors", metadata={"format": "pt"})
        self._written.append(list(self._held))
        self._total_bytes += self._held_bytes
        self._held, self._held_bytes = {}, 0

    def close(self) -> None:
        """Writes the rest, names the files as Hugging Face does, and copies config and tokenizer."""
        if self._held:
            self._flush()
        count = len(self._written)
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._written, 1):
            final = "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            (self._folder / f"part-{number}.safetensors").rename(self._folder / final)
            weight_map |= dict.fromkeys(names, final)
        if count > 1:
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            (self._folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
        for path in self._like.iterdir():
            if path.is_file() and path.suffix in {".json", ".txt", ".model", ".jinja"} and path.name != INDEX:
                shutil.copy2(path, self._folder / path.name)
