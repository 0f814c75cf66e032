"""Finds where two models part that should compute the same: the first module that differs by more than rounding, and how it differs."""
