"""What samples are drawn by, beside the policy's weights and what is asked of the engine for each prompt."""

from __future__ import annotations

import hashlib
import inspect
import json
from pathlib import Path

from rlbatch.api import ForeignBackend, RolloutBackend
from rlbatch.config.schema import Config
from rlbatch.engines.host.inventory import software


def sampler_key(config: Config, backend: RolloutBackend, engine_folder: Path) -> str:
    """Tells samplers apart whose samples must not be mixed in a step. It says more often than necessary that two differ: that costs time.

    Args:
        config: The engine's options, its own and the backend's, and its precision.
        backend: Whose code and interpreter it is.
        engine_folder: Config, tokenizer, templates and code that engines read.
    """
    rollout = config.rollout
    options = [rollout.name, rollout.options, rollout.engine, rollout.quantization, config.train.precision, config.cluster.environment]
    files = [[str(path.relative_to(engine_folder)), _digest(path)] for path in sorted(engine_folder.rglob("*")) if path.is_file()]
    code = _digest(Path(inspect.getfile(type(backend)))) if hasattr(inspect.getmodule(type(backend)), "__file__") else ""
    interpreter = backend.software if isinstance(backend, ForeignBackend) else software()
    return json.dumps([options, files, code, interpreter], sort_keys=True, default=str)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
