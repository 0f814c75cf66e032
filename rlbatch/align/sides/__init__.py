"""Models that compute the same tokens: transformers, the trainer, engines."""
