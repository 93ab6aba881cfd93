"""Runtimes of exported models: llama.cpp, onnxruntime, OpenAI-compatible servers."""
