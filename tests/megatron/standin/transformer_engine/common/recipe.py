"""Names only."""


class DelayedScaling:
    """A base class of Megatron's."""
