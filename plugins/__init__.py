"""The built-in plugins. Of rlbatch they import `rlbatch.api`, those for engines `rlbatch.engines` and `rlbatch.collectives` too; torch inside functions."""
