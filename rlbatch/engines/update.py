"""One update of an engine's weights, as the rank that has its host tells it: through the host alone, or over lines to the workers."""

from __future__ import annotations

from typing import Any, Protocol

from rlbatch.engines.client import Call, EngineHost
from rlbatch.engines.lines import Lines
from rlbatch.engines.wire import Header


class Update(Protocol):
    """What ``WeightSender`` tells an engine."""

    def load(self, content: bytes, last: int | None) -> Call:
        """Begins to load a call's tensors; ``last``: with the last ones, the policy version of all.

        Args:
            content: ``devices``, see ``WeightReceiver.tensors``; JSON.
            last: None: more will come.
        """

    def finish(self, version: int, said: dict[str, Any]) -> None:
        """When all is loaded: until the engine samples with these weights only.

        Args:
            version: Of the policy; -1: there was nothing to load.
            said: The answer to the last call of ``load``.
        """


class HostUpdate:
    """Every call goes to the host.

    Args:
        host: The engine.
        header: Of ``start_update``: whether it is an ``audit``, and of the ``draft``.
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
    """Tensors go to the workers, which need nothing else; while they load the last ones the host prepares the engine for requests.

    Engines that compute in lockstep must be stopped first, and go on last.

    Args:
        host: The engine.
        lines: To its workers.
        header: Of ``start_update``.
        limit_s: For each call, seconds.
    """

    def __init__(self, host: EngineHost, lines: Lines, header: Header, limit_s: float) -> None:
        self._host, self._lines, self._header, self._limit_s = host, lines, header, limit_s
        self._has_begun = False
        self._start = host.begin("start_update", header) if lines.in_lockstep else None
        self._end: Call | None = None

    def load(self, content: bytes, last: int | None) -> Call:
        """As ``Update``."""
        if not self._has_begun and self._start is not None:
            self._start.result(self._limit_s)
        call = self._lines.begin("load_weights", {"starts": not self._has_begun, "ends": last is not None}, content)
        self._has_begun = True
        if last is not None and not self._lines.in_lockstep:
            # Not earlier: a scheduler that forgets its cache keeps a worker in its process from its work.
            self._start = self._host.begin("start_update", self._header)
            self._end = self._ended(last)
        return call

    def finish(self, version: int, said: dict[str, Any]) -> None:
        """As ``Update``."""
        end = self._ended(version) if self._end is None else self._end
        end.result(self._limit_s)

    def _ended(self, version: int) -> Call:
        return self._host.begin("finish_update", {"policy_version": version, "is_loaded": True}, after=self._start)
