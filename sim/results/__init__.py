"""What a run leaves: statistics, tables, series, comparisons and figures."""
