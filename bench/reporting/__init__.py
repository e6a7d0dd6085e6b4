"""From runs to tables: results on disk, medians and ratios, and the generated page."""
