"""Promotion of models: registered versions, ledger, rollback, hooks, signatures and the keys that a project trusts."""
