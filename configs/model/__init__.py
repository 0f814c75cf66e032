"""Choices of `model=`."""
