"""Choices of `offload=`."""
