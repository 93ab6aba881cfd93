"""The forms of a fine-tuned model: merged, GGUF, ONNX. Each is written, opened where it is used, and compared."""
