"""Faults injected into a run, for tests and `ratchet chaos`."""
