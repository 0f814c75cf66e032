"""What runs in vLLM's own processes: needs vLLM, what that needs, and of rlbatch only ``engines``, which travels with it."""
