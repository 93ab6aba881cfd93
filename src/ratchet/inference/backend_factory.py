"""Who answers a generation's questions, ready to speak."""

from ratchet.inference.backend import BackendCallbacks, GenerationBackend
from ratchet.inference.spec import GenerationStart, Kind


def open_backend(kind: Kind, start: GenerationStart, ties: BackendCallbacks) -> GenerationBackend:
    """The speaker for a model of this kind; loading one may take minutes.

    Raises:
        InputError: the model is not there, not whole, or not usable here.
    """
    if kind == "gguf":
        from ratchet.inference import llama_backend

        return llama_backend.load_backend(start, ties)
    if kind == "endpoint":
        from ratchet.inference import openai_backend

        return openai_backend.load_backend(start, ties)
    from ratchet.models import lazy_imports

    lazy_imports.import_model_libraries()
    with lazy_imports.pause_garbage_collection():
        from ratchet.inference import torch_backend
    return torch_backend.load_backend(kind, start, ties)
