"""Runs a comparison as a job: its submission, and the work of its ranks."""
