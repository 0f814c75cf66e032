"""Choices of `cluster=`."""
