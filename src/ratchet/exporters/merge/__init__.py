"""Merging adapters into their base, tensor by tensor."""
