"""Metric modules that the library `evaluate` loads by file path."""
