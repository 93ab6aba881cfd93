"""Terminal output of runs, sweeps and generations."""
