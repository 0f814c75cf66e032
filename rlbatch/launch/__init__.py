"""Starting a job's ranks, and ending all of them."""
