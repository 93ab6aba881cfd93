"""Opens the inference backend for a kind of model."""

from ratchet.inference.backend import BackendCallbacks, GenerationBackend
from ratchet.inference.spec import GenerationStart, Kind


def open_backend(kind: Kind, start: GenerationStart, callbacks: BackendCallbacks) -> GenerationBackend:
    """Load a model, or connect to its server; this may take minutes.

    Raises:
        InputError: the model is missing, damaged, or not usable on this machine.
    """
    if kind in ("gguf", "endpoint"):
        from ratchet.inference import server_backends

        load = server_backends.load_llama_backend if kind == "gguf" else server_backends.load_openai_backend
        return load(start, callbacks)
    from ratchet.models import lazy_imports

    lazy_imports.import_model_libraries()
    with lazy_imports.pause_garbage_collection():
        from ratchet.inference import torch_backend
    return torch_backend.load_backend(kind, start, callbacks)
