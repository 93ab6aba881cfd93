"""Reports to other services: loggers, Prometheus, webhooks, telemetry."""
