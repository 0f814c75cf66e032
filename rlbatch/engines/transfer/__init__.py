"""Weights on their way: buckets, checksums, shared memory or a group of GPUs, the sender of a rank and the receiver of a worker."""
