"""Runs, sweeps, logged models and registered models in MLflow."""
