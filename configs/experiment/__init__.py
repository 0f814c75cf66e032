"""Choices of `experiment=`."""
