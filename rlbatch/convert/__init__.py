"""The command ``python -m rlbatch.convert``: checkpoints between Hugging Face folders and torch_dist, and between fp8 and bf16.

A conversion is a list of output files, each a stream of bytes whose length is known before it starts (``output``). Streams are made tensor
by tensor; whatever a mode does, the rest follows from the list: progress, resuming, sharing out, verification (``run``).
"""
