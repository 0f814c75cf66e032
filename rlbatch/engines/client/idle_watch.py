"""Whether an engine lives while nothing is awaited of it, as when the model trains."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from rlbatch.api import EngineLost

if TYPE_CHECKING:
    from rlbatch.engines.client.engine_process import EngineHost

WATCH_S = 5.0
"""Between two looks. Each asks the kernel for the state of the few processes that the engine needs."""


class Watch:
    """A thread that looks at an engine until its end, which it notes: the next call fails, and the engine's log says when it was.

    Args:
        host: The engine, started.
    """

    def __init__(self, host: EngineHost) -> None:
        self._host, self._over = host, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True, name="engine-watch")
        self._thread.start()

    def end(self) -> None:
        """What ends from here on shall end; nothing is noted any more."""
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(WATCH_S):
            try:
                self._host.check()
            except EngineLost as lost:
                self._note(lost)
                return
            except OSError:  # the system does not let anybody look now, e.g. because a limit of open files is reached
                continue

    def _note(self, lost: EngineLost) -> None:
        with suppress(OSError), self._host.log.open("a") as log:
            log.write(f"\n{time.strftime('%Y-%m-%d %H:%M:%S')} {lost.reason}\n")
