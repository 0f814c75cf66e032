"""Megatron's loading of torch_dist checkpoints without pickles that could run code. Importing this module puts it in place.

Stock, ``.metadata`` is unpickled freely, and whatever it calls an object (rather than a tensor) is too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies import torch as strategies
from megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from rlbatch.checkpoint.unpickle import read_metadata


class _Reader(CachedMetadataFileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._cached_metadata is None:
            self._cached_metadata = read_metadata(Path(self.path))
            self._cached_metadata.storage_meta = self._cached_metadata.storage_meta or StorageMeta()
            self._cached_metadata.storage_meta.load_id = self.load_id
        return self._cached_metadata


class _Planner(strategies.MCoreLoadPlanner):
    def load_bytes(self, read_item: Any, value: Any) -> None:
        loaded = torch.load(value, weights_only=True)
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], loaded)
        else:
            self.state_dict[read_item.dest_index.fqn] = loaded


strategies._get_filesystem_reader = lambda checkpoint_dir, cache_metadata=False: _Reader(checkpoint_dir)
strategies.MCoreLoadPlanner = _Planner
