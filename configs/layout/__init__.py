"""Choices of `layout=`."""
