"""Forecasts the memory that a training needs, without loading weights."""
