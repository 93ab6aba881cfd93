"""Clients of the runtimes of exported models: llama.cpp, onnxruntime, OpenAI-compatible servers."""
