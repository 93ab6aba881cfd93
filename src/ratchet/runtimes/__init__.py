"""Where exported models run: llama.cpp and onnxruntime. No torch: deployment uses them too."""
