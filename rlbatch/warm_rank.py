"""What a rank of a pool imports first. The process that forks ranks imports it once for all of them, and ends with the tests."""

import gc
import os

from rlbatch.rank_pools import end_with_parent

end_with_parent()
os.environ.update({"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"})  # torch reads them at its import

gc.disable()  # imports would look again and again through half a million objects that stay
import transformers.models.auto.modeling_auto  # noqa: E402
import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: E402, F401  # with what all models share

import rlbatch.pipeline.assemble  # noqa: E402
import rlbatch.pipeline.bare_trainer  # noqa: E402, F401
from rlbatch.registry import load_plugins  # noqa: E402

load_plugins()
gc.collect()
gc.freeze()  # ranks look through what is theirs alone
gc.enable()
