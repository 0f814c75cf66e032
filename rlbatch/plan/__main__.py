"""Runs ``python -m rlbatch.plan``. The command itself is outside this package, which only does arithmetic."""

from __future__ import annotations

import gc
import sys

if __name__ == "__main__":
    gc.disable()  # arithmetic of a second or ten leaves next to no cycles, and to look for them while modules are imported took a tenth
    from rlbatch.launch.records.streams import keep_output
    from rlbatch.planner import main

    keep_output()
    sys.exit(main(sys.argv[1:]))
