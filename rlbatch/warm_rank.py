"""What a rank of a pool imports first. The process that forks ranks imports it once for all of them, and ends with the tests."""

import os

from rlbatch.rank_pools import end_with_parent

end_with_parent()
os.environ.update({"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"})  # torch reads them at its import

import rlbatch.pipeline.assemble  # noqa: E402
import rlbatch.pipeline.bare_trainer  # noqa: E402, F401
