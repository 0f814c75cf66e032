"""Buckets of weights from the ranks of an engine to its workers: through memory that both use, or over a group to other GPUs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from typing import Any

from rlbatch.api import WeightBucket
from rlbatch.engines.client.engine_process import Call, EngineHost
from rlbatch.engines.protocol.frames import Header
from rlbatch.engines.transfer.receiver import EVERY_DEVICE
from rlbatch.engines.transfer.shared_memory import device_identity
from rlbatch.engines.transfer.staging import CallContent, Staging
from rlbatch.engines.transfer.weight_group import WeightGroup

Gather = Callable[[bytes], list[bytes]]
"""All-gather over the ranks of an engine on a node, in their order; also a barrier."""


class WeightSender:
    """This rank's part in sending weights to the engine that it shares with its neighbours.

    Of the ranks on a device the first one shows its workers what they shall read; the first of all holds the host and tells it, for every
    device, what is there. With a group that rank alone sends, to all workers. While an engine loads, the ranks gather what comes next.

    Args:
        host: The engine; None on the ranks that have none.
        device: This rank's.
        gather: All-gather over the engine's ranks on this node.
        limit_s: Longest loading of one call, seconds.
        place: This rank's among them.
        group: Group with the engine's workers, if they are on other GPUs; on the rank that has the host.
        is_collective: Whether there is such a group; the same on all of them.
    """

    def __init__(
        self,
        host: EngineHost | None,
        device: str,
        gather: Gather,
        limit_s: float,
        place: int = 0,
        group: WeightGroup | None = None,
        *,
        is_collective: bool = False,
    ) -> None:
        self._host, self._device, self._gather, self._limit_s = host, device, gather, limit_s
        self._place, self._group, self._is_collective = place, group, is_collective
        self._staging = Staging(device, can_share=not is_collective)
        self._identity, self._sends = "", False
        self._known: set[str] = set()
        self._messages: dict[int, tuple[CallContent, bytes]] = {}
        self._calls = 0
        self._start: Call | None = None

    def send(self, buckets: Iterable[WeightBucket], header: Header | None = None, *, double_buffered: bool = True) -> int:
        """Sends every bucket, as one update; a collective of the engine's ranks.

        Args:
            buckets: Buckets to send; at least one.
            header: Header of ``start_update``: whether it is an ``audit``, of the ``draft``, may ``replay`` the last, and has a ``check``.
            double_buffered: Whether the next ones are gathered while the engine loads. If not, that takes half the memory.

        Returns:
            The policy version of the weights.

        Raises:
            RolloutError: the engine refuses a tensor, or there is no memory for a bucket.
        """
        self._find_senders()
        self._staging.start(double_buffered=double_buffered)
        self._start = self._host.begin("start_update", header or {}) if self._host is not None else None
        version, loading, sent_keys, self._calls = -1, None, set[str](), 0
        try:
            for bucket in buckets:
                version = bucket.policy_version
                tensors = self._staging.stage(bucket) if self._sends else None
                if self._on_any(tensors is not None and not self._staging.has_room(tensors)):
                    loading = self._load(loading, sent_keys)
                    if not double_buffered:
                        self._await(loading)
                        loading = None
                if tensors is not None:
                    self._staging.add(tensors)
            answer = self._await(self._load(loading, sent_keys, last=version))
        except BaseException:
            self._known = set()
            self.close()
            raise
        finally:
            self._staging.release()
        self._known = sent_keys
        if self._host is not None and self._start is not None:
            self._start.result(self._limit_s)
            if not answer.get("is_finished"):
                self._host.call("finish_update", {"policy_version": version}, limit_s=self._limit_s)
        return version

    def sends(self) -> bool:
        """Whether this rank sends; a collective of the engine's ranks on this node."""
        self._find_senders()
        return self._sends

    def close(self) -> None:
        """Leaves the group, before the engine is ended, whose workers would be waited for."""
        if self._group is not None:
            self._group.abort()

    def _find_senders(self) -> None:
        """Which ranks send: the first one on each device, or the one that is in the group."""
        if self._identity:
            return
        self._identity = EVERY_DEVICE if self._is_collective else device_identity(self._device)
        identities = [identity.decode() for identity in self._gather(self._identity.encode())]
        self._sends = self._host is not None if self._is_collective else identities.index(self._identity) == self._place

    def _on_any(self, answer: bool) -> bool:
        """Whether one of the engine's ranks on this node answers True; a collective, after which all of them do the same."""
        return b"1" in self._gather(b"1" if answer else b"0")

    def _load(self, previous: Call | None, sent_keys: set[str], last: int | None = None) -> Call | None:
        """Lets the engine load what was collected, and waits for the call before: its memory may be written again.

        Args:
            previous: That call.
            sent_keys: Gets the keys of all that the engine is told.
            last: Policy version of the weights, with the last call.
        """
        message, memory = b"", None
        if self._sends:
            taken, memory = self._staging.take()
            if self._is_collective:
                taken["broadcast"] = len(memory)
            message = self._message(self._calls, taken)
        self._calls += 1
        messages = [each.split(b"\n", 2) for each in self._gather(message) if each]
        loading = None
        if self._host is not None:
            devices = {}
            for identity, name, told_places in messages:
                # What came in the last sync too, such as the places of tensors that the trainer keeps, is known by its key.
                devices[identity.decode()] = {"key": name.decode()} | ({} if name.decode() in self._known else json.loads(told_places))
                sent_keys.add(name.decode())
            content = json.dumps({"devices": devices}).encode()
            loading = self._host.begin("load_weights", {"last": last}, content, after=self._start)
            if self._group is not None and memory is not None and self._host.lost is None:
                self._group.send(memory)
        self._await(previous)
        return loading

    def _message(self, number: int, content: CallContent) -> bytes:
        """The payload of the call with this number: this rank's device, a key, and what is loaded; most syncs have the same as the last."""
        before = self._messages.get(number)
        if before is None or before[0] != content:
            text = json.dumps(content).encode()
            message = b"\n".join((self._identity.encode(), hashlib.sha256(text).hexdigest().encode(), text))
            before = self._messages[number] = content, message
        return before[1]

    def _await(self, loading: Call | None) -> dict[str, Any]:
        """Waits, on every rank, until the engine has loaded it; returns what it said."""
        answer: dict[str, Any] = {}
        if loading is not None:
            answer = loading.result(self._limit_s)
            if self._group is not None and self._host is not None and self._host.lost is not None:
                self._group.abort()
        self._gather(b"")
        return answer
