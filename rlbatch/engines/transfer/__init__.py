"""Weights on their way: buckets, shared memory or a group of GPUs, the sender of a rank and the receiver of a worker."""
