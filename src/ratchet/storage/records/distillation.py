"""What a teacher has said about the training rows, as `ratchet distill` seals it."""

from ratchet.storage.records.base import Record

CARD = "distill.json"
AGAIN = "run `ratchet distill`"


class Teaching(Record):
    """The card of experiments/distill. Beside it lie the probabilities: shard-NNNNN.safetensors."""

    digest: str
    """Of the shards: what a student learns from."""
    teacher: str
    """Its directory, as written in params.yaml."""
    teacher_digest: str
    """Fingerprint of its files."""
    data_digest: str
    """Of the rows that it was asked about."""
    quantization: str
    compute_dtype: str
    temperature: float
    top_k: int
    rows: int
    positions: int
    """Answer tokens of all training rows."""
    tokens: int
    """That both tokenizers know, with the same ids."""
    teacher_rows: int
    """Of its embedding: it may be filled up beyond the tokens."""
    base_rows: int
    """The same of the base."""
    teacher_parameters: int
    base_parameters: int
    teacher_loss: float
    """Of the given answers, in nats a token: how well it knows the task itself."""
    left_out: float
    """Mean probability, at the temperature, of all tokens beyond the top_k: what is known of them is their sum."""
