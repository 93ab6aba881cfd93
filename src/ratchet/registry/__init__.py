"""Promotion of models: registered versions, ledger, rollback, hooks."""
