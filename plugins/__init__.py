"""The built-in plugins. Of rlbatch they import `rlbatch.api`, those with an engine in a process of its own also `rlbatch.engines`; torch only inside functions."""
