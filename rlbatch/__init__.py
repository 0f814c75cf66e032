"""rlbatch: GRPO-style reinforcement learning of mixture-of-experts language models as a plain batch job."""

__version__ = "0.1.0"
