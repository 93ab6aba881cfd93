"""Settings of `machine.endpoint`: how servers of models are asked, whoever asks them."""

from ratchet.fields import Positive, PositiveCount, Section


class Endpoint(Section):
    """How OpenAI-compatible servers (vLLM, llama.cpp and others) are asked; their key is in RATCHET_ENDPOINT_KEY."""

    requests: PositiveCount = 8
    """Requests in flight at once."""
    answer_s: Positive = 600.0
    """Longest wait for one whole answer, in seconds; then the request is sent again."""
    tries: PositiveCount = 8
    """Of one request, after 429, 5xx, broken connections, stalls and answers that are none; then exit 75."""
    pause_s: Positive = 1.0
    """Wait before the second try, in seconds; doubled with each, to 60 at most, or as long as the server asks for."""
