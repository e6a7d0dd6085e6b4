"""Results of runs: JSON files, medians and ratios, tables, and the generated page."""
