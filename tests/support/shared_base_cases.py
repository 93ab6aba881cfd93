"""The memory of a base that ranks share: by arithmetic from the shapes of its matrices."""

from typing import Any, Literal

from transformers import LlamaConfig

from ratchet.config import Machine
from ratchet.config_train import Train
from ratchet.model import blueprint, forecast
from ratchet.model.forecast import Work
from ratchet.records_model import MemoryForecast

SHARED = Machine(shard_base=True)
HIDDEN, INNER, LAYERS, VOCABULARY = 256, 704, 40, 1000
CONFIG = LlamaConfig(
    vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=False,
)  # fmt: skip
MATRICES = [(HIDDEN, HIDDEN), (HIDDEN // 2, HIDDEN), (HIDDEN // 2, HIDDEN), (HIDDEN, HIDDEN), (INNER, HIDDEN),
            (INNER, HIDDEN), (HIDDEN, INNER)]  # fmt: skip
"""[outputs, inputs] of a layer: q, k, v, o, gate, up, down."""
Device = Literal["cpu", "cuda"]


def found(machine: Machine, ranks: int, device: Device = "cuda", **train: Any) -> MemoryForecast:
    settings = Train(**{"rank": 4, "quantization": "none", "compute_dtype": "float32"} | train)
    work = Work(1, 48, 24, packed=False, device=device, validation_rows=1, validation_tokens=48, ranks=ranks)
    return forecast.forecast(blueprint.of_config(CONFIG), settings, machine, work)


def sizes(ranks: int, quantization: str) -> tuple[int, int]:
    """Bytes of a layer's matrices, and of the share of a rank, whose rows (of packed bytes: bytes) are rounded up."""
    if quantization == "none":
        return sum(4 * o * i for o, i in MATRICES), sum(4 * -(-o // ranks) * i for o, i in MATRICES)
    return sum(o * i // 2 for o, i in MATRICES), sum(-(-o * i // 2 // ranks) for o, i in MATRICES)
