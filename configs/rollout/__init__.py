"""Choices of `rollout=`."""
