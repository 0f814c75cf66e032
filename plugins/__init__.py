"""The built-in plugins. Of rlbatch they import `rlbatch.api`, those for vLLM and SGLang `rlbatch.engines` too; torch inside functions."""
