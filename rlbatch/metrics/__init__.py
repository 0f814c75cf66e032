"""Reports of a run: metric tags, trackers, the run folder's summary and samples, live progress."""
