"""Choices of `algorithm=`."""
