"""Models in memory: loading, quantization, adapters, loss, scoring, decoding."""
