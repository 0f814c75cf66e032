"""Choices of `reward=`."""
