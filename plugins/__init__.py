"""The built-in plugins. Of rlbatch they import `rlbatch.api`, those for engines two more (docs/use/plugins.md); torch inside functions."""
