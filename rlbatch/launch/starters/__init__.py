"""The ways to start a job's ranks: processes of this machine, mpirun, a batch script for Slurm."""
