"""The rank's side: starts an engine's process, calls it, notices that it is lost."""
