"""The gate: rules and statistics that decide whether a model may be promoted."""
