"""Sums gradients over ranks, compressed for the network."""
