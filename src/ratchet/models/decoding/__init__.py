"""Batched decoding whose answers do not depend on the batch."""
