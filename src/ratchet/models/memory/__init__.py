"""Forecast of the memory that a training needs, without loading a weight."""
