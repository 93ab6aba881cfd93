"""Exports an adapter as models for other runtimes: Hugging Face, GGUF and ONNX, each verified in its runtime."""
