"""Sweeps with Optuna: search space, storage, samplers, pruners, workers, and the choice of the best trial."""
