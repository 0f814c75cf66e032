"""How ranks end: signals, the grace period before a limit, the processes above a rank, being queued again."""
