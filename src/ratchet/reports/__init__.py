"""HTML reports, plots, and the comparison of runs."""
