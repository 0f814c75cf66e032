"""A worker's end of a line from the rank, see ``rlbatch.engines.lines``: a thread loads what comes, while the scheduler is idle."""

from __future__ import annotations

import json
import socket
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from rlbatch.engines.wire import encode, read_frame, words_of

Load = Callable[[dict[str, Any], dict[str, Any]], None]
"""Gets a frame's header and its payload, both JSON."""


def serve(path: str, device: torch.device, load: Load) -> None:
    """Comes to the rank's socket; a thread serves it from here on, as long as the rank holds the line.

    Args:
        path: Of the socket.
        device: The worker's.
        load: Called for every frame; what it raises is the answer.
    """
    line = socket.socket(socket.AF_UNIX)
    line.connect(path)
    threading.Thread(target=_serve, args=(line, device, load), daemon=True, name="rlbatch-line").start()


def _serve(line: socket.socket, device: torch.device, load: Load) -> None:
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    with line, torch.no_grad(), suppress(OSError):  # the rank is gone, and this process soon will be
        while frame := read_frame(line):
            line.sendall(encode(_answer(*frame, load)))


def _answer(header: dict[str, Any], payload: bytes, load: Load) -> dict[str, Any]:
    try:
        load(header, json.loads(payload))
    except Exception as error:  # whatever vLLM raises is the rank's to judge
        with suppress(OSError):
            traceback.print_exc()
        return {"error": words_of(error)}
    return {}
