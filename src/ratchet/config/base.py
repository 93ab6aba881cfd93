"""Section `base` of params.yaml: the base model."""

from typing import Annotated

from pydantic import Field, model_validator

from ratchet.config.fields import Count, Name, Names, Positive, PositiveCount, Section


class TinyModelSettings(Section):
    """The built-in tiny model: a small decoder, pre-trained from scratch on the project's texts."""

    vocab_size: PositiveCount = 2048
    """Entries of the byte-level BPE vocabulary, special tokens included."""
    hidden_size: PositiveCount = 256
    """Width of the model."""
    intermediate_size: PositiveCount = 512
    """Width of the MLP blocks."""
    layers: PositiveCount = 3
    """Number of decoder blocks."""
    heads: PositiveCount = 4
    """Number of attention heads; must divide hidden_size."""
    sequence_length: PositiveCount = 96
    """Length of a packed pre-training sequence, in tokens."""
    batch_size: PositiveCount = 24
    """Sequences in one optimizer step."""
    steps: PositiveCount = 300
    """Optimizer steps of pre-training. The time does not depend on the size of the corpus."""
    learning_rate: Positive = 1e-2
    """Peak learning rate of pre-training (Muon, cosine schedule). A step changes a weight by about 0.2 times this."""
    seed: Count = 0
    """Seed of the initial weights and of the order of the texts."""

    @model_validator(mode="after")
    def _check_heads(self) -> "TinyModelSettings":
        if self.hidden_size % self.heads:
            raise ValueError(f"heads: found {self.heads}; expected a divisor of hidden_size ({self.hidden_size})")
        return self


class Base(Section):
    """The base model."""

    source: Annotated[str, Field(min_length=1)] = "tiny"
    """`tiny` (built here), a local directory, or a Hugging Face Hub id such as Qwen/Qwen2.5-1.5B-Instruct."""
    revision: str | None = None
    """Commit, tag or branch of the Hub id; required for a Hub id. The commit that it resolves to is recorded."""
    chat_template: Name | None = None
    """Jinja file below data/raw or data/text that replaces the tokenizer's chat template. null: the tokenizer's own."""
    added_tokens: Names = ()
    """Tokens to add to the tokenizer. Their rows of the embedding are trained."""
    trust_remote_code: str | None = None
    """Repeat base.source here to run the Python code that comes with the model. null: no such code runs."""
    convert_pickles: bool = False
    """Convert pickled weights (*.bin) to safetensors with torch's weights-only reader, which runs no code."""
    tiny: TinyModelSettings = TinyModelSettings()
    """Size and training schedule of the tiny model. Used only if source is `tiny`."""

    @model_validator(mode="after")
    def _check_trust(self) -> "Base":
        if self.trust_remote_code not in (None, self.source):
            raise ValueError(
                f"trust_remote_code: found {self.trust_remote_code!r}; expected the same as base.source "
                f"({self.source}), or null"
            )
        return self
