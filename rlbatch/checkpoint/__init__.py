"""Checkpoints on disk: Hugging Face folders, and the run's own checkpoints."""
