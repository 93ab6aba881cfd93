"""Exports GGUF files for llama.cpp."""
