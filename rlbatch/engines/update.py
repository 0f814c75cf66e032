"""One update of an engine's weights, as the rank that has its host tells it: through the host, or over lines to the workers."""

from __future__ import annotations

from typing import Any, Protocol

from rlbatch.engines.client import Call, EngineHost
from rlbatch.engines.lines import Lines
from rlbatch.engines.wire import Header


class Update(Protocol):
    """What ``WeightSender`` tells an engine."""

    def load(self, content: bytes, last: int | None) -> Call:
        """Begins to load a call's tensors.

        Args:
            content: ``devices``, see ``WeightReceiver.tensors``; JSON.
            last: With the last ones, the policy version of all; None: more will come.
        """

    def finish(self, version: int, said: dict[str, Any]) -> None:
        """When all is loaded: until the engine samples with these weights only.

        Args:
            version: Of the policy.
            said: The answer to the last call of ``load``.
        """


class HostUpdate:
    """Every call goes to the host.

    Args:
        host: The engine.
        header: Of ``start_update``: whether it is an ``audit``, of the ``draft``, and may ``replay`` the update before.
        limit_s: For each call, seconds.
    """

    def __init__(self, host: EngineHost, header: Header, limit_s: float) -> None:
        self._host, self._limit_s = host, limit_s
        self._start = host.begin("start_update", header)

    def load(self, content: bytes, last: int | None) -> Call:
        """As ``Update``; the engine starts the update before."""
        return self._host.begin("load_weights", {"last": last}, content, after=self._start)

    def finish(self, version: int, said: dict[str, Any]) -> None:
        """As ``Update``; the last loading may have ended it."""
        self._start.result(self._limit_s)
        if not said.get("is_finished"):
            self._host.call("finish_update", {"policy_version": version}, limit_s=self._limit_s)


class LineUpdate:
    """Tensors go to the workers of an engine that is idle. While they load the last ones the host prepares it for requests.

    Args:
        host: The engine.
        lines: To its workers.
        limit_s: For each call, seconds.
    """

    def __init__(self, host: EngineHost, lines: Lines, limit_s: float) -> None:
        self._host, self._lines, self._limit_s = host, lines, limit_s
        self._has_begun = False
        self._preparing: Call | None = None

    def load(self, content: bytes, last: int | None) -> Call:
        """As ``Update``."""
        how = {"starts": not self._has_begun, "ends": last is not None}
        loading = self._lines.begin("load_weights", how, content, limit_s=self._limit_s)
        self._has_begun = True
        if last is not None:
            # Not earlier: a scheduler that forgets its cache keeps a worker in its process from its work.
            self._preparing = self._host.begin("prepare", {"policy_version": last})
        return loading

    def finish(self, version: int, said: dict[str, Any]) -> None:
        """As ``Update``."""
        assert self._preparing is not None
        self._preparing.result(self._limit_s)
