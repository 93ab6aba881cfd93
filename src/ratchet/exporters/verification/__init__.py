"""Comparison of merged and exported models with base + adapter as peft computes it."""
