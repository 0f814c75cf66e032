"""Files of rows: jsonl, as it is or compressed, and parquet; row by row, or any row at once."""
