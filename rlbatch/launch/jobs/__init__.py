"""The jobs that were started from here: their records, and following their logs."""
