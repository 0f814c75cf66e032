"""The config: its schema, and Hydra's composition checked against it."""
