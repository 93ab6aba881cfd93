"""What a terminal shows of runs, sweeps and generations."""
