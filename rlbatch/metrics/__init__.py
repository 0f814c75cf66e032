"""What a run reports: tags, trackers, the run folder's summary and samples, live progress."""
