"""What both sides of an engine's process agree on: frames, names of shared memory, and numbers that look random."""
