"""Reports of runs to other services: MLflow, Prometheus, webhooks."""
