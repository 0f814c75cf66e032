"""``python -m rlbatch.plan``: the command is above this package, which is arithmetic alone."""

from __future__ import annotations

import sys

from rlbatch.launch.records.streams import keep_output
from rlbatch.planner import main

if __name__ == "__main__":
    keep_output()
    sys.exit(main(sys.argv[1:]))
