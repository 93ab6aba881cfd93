"""Where runs are reported: MLflow, Prometheus, webhooks."""
