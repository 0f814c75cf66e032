"""What runs in SGLang's own processes: needs SGLang, its torch and the standard library, nothing else."""
