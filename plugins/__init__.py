"""The built-in plugins. Each module imports `rlbatch.api` and nothing else of rlbatch; torch only inside functions."""
