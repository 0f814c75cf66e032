"""Plans a job before it is queued, without torch: its memory, its time a step, its layout and its engines, by arithmetic."""
