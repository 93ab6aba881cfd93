"""Settings: one module per section of params.yaml; reading, validating and editing it."""
