"""Hydra config groups (yaml), importable so that an installed wheel carries them."""
