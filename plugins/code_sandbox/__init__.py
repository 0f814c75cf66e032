"""Runs programs that nobody has read: each in a jail of its own, from which neither the run nor the machine can be seen or changed."""
