"""Exit codes, the same for every command, launcher and rank; the table of them is in docs/use/troubleshooting.md."""

DONE = 0
FAILED = 1
"""Something that was started has failed."""
REFUSED = 2
"""Nothing was started: the user's arguments, files or machine cannot be right."""
STOPPED = 75
"""The job was asked to stop and has saved, to go on later. A signal that left nothing to save gives 128 + its number, Ctrl-C 130."""
