"""What Slurm is asked: scontrol, the queue, the job that this process belongs to."""
