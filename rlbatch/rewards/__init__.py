"""Scores responses: rewards that run in the rank, and those of a host with workers while others are generated."""
