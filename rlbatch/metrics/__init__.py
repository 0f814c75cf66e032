"""What a run reports: tags, TensorBoard, the run folder's summary and samples, live progress."""
