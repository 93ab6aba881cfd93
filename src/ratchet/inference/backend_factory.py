"""Who answers a generation's questions, ready to speak."""

from ratchet.inference.backend import Speaker, Ties
from ratchet.inference.spec import GenerationStart, Kind


def opened(kind: Kind, start: GenerationStart, ties: Ties) -> Speaker:
    """The speaker for a model of this kind; loading one may take minutes.

    Raises:
        InputError: the model is not there, not whole, or not usable here.
    """
    if kind == "gguf":
        from ratchet.inference import llama_backend

        return llama_backend.load(start, ties)
    if kind == "endpoint":
        from ratchet.inference import openai_backend

        return openai_backend.load(start, ties)
    from ratchet.models import lazy_imports

    lazy_imports.load()
    with lazy_imports.uncollected():
        from ratchet.inference import torch_backend
    return torch_backend.load(kind, start, ties)
