"""Compares merged and exported models with base + adapter as peft computes it."""
