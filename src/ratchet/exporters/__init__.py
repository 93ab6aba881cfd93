"""From an adapter to models that others can run: Hugging Face, GGUF and ONNX, each verified in its own runtime."""
