"""Releases of promoted models, with the files that servers need and a smoke test."""
