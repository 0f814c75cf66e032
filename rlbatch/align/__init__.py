"""Finds where two models diverge that should compute the same: the first module that differs by more than rounding, and how it differs."""
