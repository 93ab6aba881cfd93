"""Signatures of promoted models: keys, identities, and which of them a project trusts."""
