"""What a run reports: figures from counts, records, tables, plots, timing, and a sample in colour."""
