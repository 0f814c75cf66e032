"""What runs in vLLM's own processes: needs vLLM, its torch and the standard library, nothing else."""
