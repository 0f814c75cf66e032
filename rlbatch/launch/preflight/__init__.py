"""Checks of a job's nodes before the model is built."""
