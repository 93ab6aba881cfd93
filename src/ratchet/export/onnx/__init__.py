"""ONNX graphs for onnxruntime."""
