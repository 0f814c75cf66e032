"""What both sides of an engine's process agree on: frames, and names of shared memory."""
