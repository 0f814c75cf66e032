"""What a job writes into its run folder about itself: attempts, first error, logs, locks."""
