"""Gradients that several ranks add up, compressed on the wire."""
