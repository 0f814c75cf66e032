"""Weight syncs without vLLM's loaders: what they did in the first sync is recorded as copies, which later syncs repeat."""
