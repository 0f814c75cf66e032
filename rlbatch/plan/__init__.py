"""What can be known about a job before it is queued: pure arithmetic, no torch."""
