"""Errors that users see are one message, without a traceback.

Style: ``<config key>=<value>: <invariant with numbers>. <fix>.``
"""


class RlbatchError(Exception):
    """Base class: the message alone is shown to the user. Exit code 2 where nothing was started yet, 1 on a rank of a job that runs."""


class ConfigError(RlbatchError):
    """A config key, value or combination that cannot be right."""


class PluginError(RlbatchError):
    """A plugin that does not import, does not fit the API, or clashes with another."""


class DataError(RlbatchError):
    """A prompt file or Hugging Face folder that cannot be used; starts with ``path:line:`` where there is one."""


class RewardError(RlbatchError):
    """A reward that raised, returned the wrong number of values, or returned NaN."""


class Unscored(RewardError):
    """Raised by a reward that gives no verdict on its samples, and that is no mistake of its own: a server that does not answer."""


class ModelError(RlbatchError):
    """A model or checkpoint that does not match its mapping."""


class RolloutError(RlbatchError):
    """An engine that failed, or whose answer does not fit its request."""


class EngineLost(RolloutError):
    """An engine whose process ended, or which gives no sign of life: another one in its place may answer.

    Attributes:
        reason: Why, in one line.
    """

    def __init__(self, reason: str, log_tail: str = "") -> None:
        """Args:
        reason: Why, in one line, without a full stop.
        log_tail: What else the message says, e.g. the end of the engine's log.
        """
        super().__init__(f"{reason}. {log_tail}".strip())
        self.reason = reason


class LaunchError(RlbatchError):
    """Ranks that did not meet, or that died, left or hang."""


class PreflightError(RlbatchError):
    """A node that cannot run the job, found before the model was built."""


class CheckpointError(RlbatchError):
    """A checkpoint that could not be written."""
