"""Calls of plugins' code: an exception is told with the plugin's name, and what the code changes of the process's state is put back.

Else a reward that turns gradients off, or makes float64 the default, would train the policy differently without a word.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rlbatch.api import PluginError, RlbatchError
from rlbatch.api.secrets import without_secrets

MOST_CHARACTERS = 4000
"""Longest text of an exception in a message."""
_OWN = Path(__file__).parent


class Setting(NamedTuple):
    """A part of the process's state that the run depends on.

    Attributes:
        name: What messages call it.
        get: Its value now.
        put: Sets it; None: it cannot be set.
    """

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], object] | None


def _folder() -> str | None:
    with suppress(OSError):  # it was removed
        return os.getcwd()
    return None


def _put_folder(folder: str | None) -> None:
    if folder:
        os.chdir(folder)


def _of_torch(torch: Any) -> Iterator[Setting]:
    """The settings of torch on which the run depends. The inference mode comes first, as gradients follow it."""
    yield Setting("torch's inference mode", torch.is_inference_mode_enabled, None)
    yield Setting("torch's gradients", torch.is_grad_enabled, torch._C._set_grad_enabled)
    yield Setting("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype)
    yield Setting("torch's default device", torch.get_default_device, lambda _: torch.set_default_device(None))
    yield Setting(
        "torch's deterministic algorithms",
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda modes: torch.use_deterministic_algorithms(modes[0], warn_only=modes[1]),
    )
    yield Setting("torch's matmul precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision)
    yield Setting("torch's number of threads", torch.get_num_threads, torch.set_num_threads)
    for device in ("cpu", "cuda"):
        is_on, put = partial(torch.is_autocast_enabled, device), partial(torch.set_autocast_enabled, device)
        yield Setting(f"torch's autocast on {device}", is_on, put)


def _settings() -> Iterator[Setting]:
    yield Setting("the current folder", _folder, _put_folder)
    if torch := sys.modules.get("torch"):
        yield from _of_torch(torch)


_told: set[tuple[str, str]] = set()


@contextmanager
def state_kept(what: str) -> Iterator[None]:
    """Puts the process's state back as it was before, and says once in the rank's output what the plugin changed.

    Raises:
        PluginError: what cannot be put back.
    """
    before = [(setting, setting.get()) for setting in _settings()]
    try:
        yield
    finally:
        for setting, value in before:
            if (changed := setting.get()) == value:
                continue
            if setting.put is None:
                raise PluginError(f"{what}: left {setting.name} at {changed}. Use it in a `with` that ends before every return and yield.")
            setting.put(value)
            if (what, setting.name) not in _told:
                _told.add((what, setting.name))
                shown = f" from {value} to {changed}" if len(f"{value}{changed}") < 80 else ""
                print(f"{what}: changed {setting.name}{shown}; put back after each call", file=sys.stderr, flush=True)


@contextmanager
def foreign_code(what: str, part: str = "", *, error_type: type[RlbatchError] = PluginError, on: str = "") -> Iterator[None]:
    """A context for a call of a plugin: the process's state is kept, and whatever the plugin raises names it.

    What asks a rank to end passes, as do messages of rlbatch's error types where ``on`` has nothing to add.

    Args:
        what: The plugin, e.g. ``algorithm.loss=mine``.
        part: The part of the plugin that is called, e.g. ``its build``; empty: all that there is.
        error_type: Class of the error that is raised.
        on: What it was called with, in words; empty: not said.

    Raises:
        RlbatchError: of ``error_type``.
    """
    with state_kept(what):
        try:
            yield
        except BaseException as error:  # foreign code may raise anything, sys.exit too
            is_message = isinstance(error, RlbatchError)
            if (is_message and not on) or (not is_message and type(error).__module__.startswith("rlbatch.")):
                raise
            at = f"{error_location(error)}{on and f' on {on}'}"
            raise error_type(f"{what}: {part and f'{part} '}raised {error_text(error)}{at}. Correct it.") from error


@contextmanager
def foreign_context(what: str, make: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """A plugin's context manager, entered and left as ``foreign_code``."""
    with ExitStack() as stack:
        with foreign_code(what):
            stack.enter_context(make())
        yield
        with foreign_code(what):
            stack.close()


def error_text(error: BaseException) -> str:
    """An exception's type and ``text``."""
    name, said = type(error).__name__, text(error)
    return f"{name}: {said}" if said else name


def text(error: BaseException) -> str:
    """An exception's text, of bounded length and without secrets, whatever its ``__str__`` does."""
    try:
        said = without_secrets(str(error))
    except BaseException as broken:  # foreign code
        return f"its text cannot be shown, as that raises {type(broken).__name__}"
    return said if len(said) <= MOST_CHARACTERS else f"{said[:MOST_CHARACTERS]}... ({len(said)} characters)"


def error_location(error: BaseException) -> str:
    """Says where foreign code was, e.g. `` (mine.py:12, in decoder.py:355)``: its first frame, and the one that raised."""
    frames = traceback.extract_tb(error.__traceback__)
    foreign = [frame for frame in frames if _OWN not in Path(frame.filename).parents] or frames
    if not foreign:
        return ""
    first, last = (f"{Path(frame.filename).name}:{frame.lineno}" for frame in (foreign[0], foreign[-1]))
    return f" ({first})" if first == last else f" ({first}, in {last})"
