"""GGUF files for llama.cpp."""
