"""The trainer on Megatron-core, and the only package that imports megatron. Importing it makes Megatron-core usable without CUDA."""

from rlbatch.megatron import cpu

cpu.install()  # before anything imports megatron

from rlbatch.megatron import patches  # noqa: E402

patches.install()
