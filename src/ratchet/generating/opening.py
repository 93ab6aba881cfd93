"""Who answers a generation's questions, ready to speak."""

from ratchet.generating.speakers import Speaker, Ties
from ratchet.generating.spec import GenerationStart, Kind


def opened(kind: Kind, start: GenerationStart, ties: Ties) -> Speaker:
    """The speaker for a model of this kind; loading one may take minutes.

    Raises:
        InputError: the model is not there, not whole, or not usable here.
    """
    if kind == "gguf":
        from ratchet.generating import with_llama

        return with_llama.load(start, ties)
    if kind == "endpoint":
        from ratchet.generating import at_endpoint

        return at_endpoint.load(start, ties)
    from ratchet.model import libraries

    libraries.load()
    with libraries.uncollected():
        from ratchet.generating import in_memory
    return in_memory.load(kind, start, ties)
