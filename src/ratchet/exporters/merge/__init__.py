"""Merges adapters into their base, tensor by tensor."""
