"""Settings: one module for each section of params.yaml, and reading, checking and editing that file."""
