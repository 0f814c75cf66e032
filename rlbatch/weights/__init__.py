"""Weights between Hugging Face names and Megatron's shards: applying a family's mappings, and sending the result to engines."""
