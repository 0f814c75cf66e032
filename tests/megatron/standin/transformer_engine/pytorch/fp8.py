"""Nothing is fp8."""

import contextlib

fp8_autocast = contextlib.nullcontext


class FP8GlobalStateManager:
    """Says so."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        """Never."""
        return False
