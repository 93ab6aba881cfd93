"""Metric modules that the library `evaluate` loads from their path, and what they share."""
