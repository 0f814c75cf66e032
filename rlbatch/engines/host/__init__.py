"""The engine's side, under its own interpreter: the server, and what engines have in common."""
