"""Asks one model about all rows, batch by batch; what it said before a kill is taken from the store."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from ratchet.config.evaluation import Evaluate
from ratchet.data.batches import micro_batches
from ratchet.evaluation.score_cache import ScoreStore
from ratchet.models import label_scoring as label_room
from ratchet.models import scoring
from ratchet.models.decoding import token_choice
from ratchet.models.loading import Model
from ratchet.models.memory import capacity, parameters
from ratchet.models.scoring import Likelihood
from ratchet.storage import digests

Tokens = Sequence[int]
Batch = list[int]
"""Indices of rows that are computed at once."""


@dataclass(frozen=True)
class Scorer:
    """Scores any model in exactly the same way.

    Batches are planned over all rows before the first is computed, so an evaluation that was broken off goes on with
    the batches that it began with. A key of the store names all that a batch is asked, to the last token: an entry of
    other rows, other settings or another batch size is never taken.
    """

    model: Model
    pad: int
    """Token that rows are filled with."""
    batch_rows: int
    store: ScoreStore
    """Of this model, in this arithmetic: neither is in the keys."""
    progress: Callable[[int, int], None]
    """Told how many rows are done, and of how many."""

    def likelihoods(self, input_ids: Sequence[Tokens], labels: Sequence[Tokens]) -> list[Likelihood]:
        """Likelihood of each row, answer (what has a label) and prompt apart, in the order of the rows."""

        def ask(rows: Batch) -> dict[str, Any]:
            return {"rows": [[list(input_ids[i]), list(labels[i])] for i in rows]}

        def compute(rows: Batch) -> list[tuple[float, int, float, int]]:
            found = scoring.likelihoods(
                self.model, [input_ids[i] for i in rows], [labels[i] for i in rows], self.pad
            )  # fmt: skip
            return [(one.nll, one.tokens, one.prompt_nll, one.prompt_tokens) for one in found]

        batches = micro_batches(list(range(len(input_ids))), [len(ids) for ids in input_ids], self.batch_rows)
        return [Likelihood(*found) for found in self._each("likelihoods", batches, ask, compute)]

    def text(self, blocks: Sequence[Tokens]) -> list[Likelihood]:
        """Likelihood of plain text: every token of a block but its first counts as answer."""
        return self.likelihoods(blocks, blocks)

    def answers(
        self, tokenizer: Any, prompts: Sequence[Tokens], ends: Sequence[int], wanted: Evaluate
    ) -> list[list[str]]:  # fmt: skip
        """Answers to each prompt (ids that end where the assistant begins), in their order, stripped.

        A prompt's draws depend on nothing but the seed, the prompt, and which of several equal ones it is.

        Args:
            tokenizer: turns tokens into text; special ones are left out.
            ends: tokens that end an answer.
            wanted: max_new_tokens; samples (one is greedy, more are drawn); temperature and seed of what is drawn.
        """
        samples = wanted.samples
        pairs = [(i, sample) for i in range(len(prompts)) for sample in range(samples)]
        names = _names(prompts)

        def streams(batch: Batch) -> list[str]:
            return [token_choice.stream(wanted.seed, names[pairs[k][0]], pairs[k][1]) for k in batch]

        def ask(batch: Batch) -> dict[str, Any]:
            drawn = {"temperature": wanted.temperature, "streams": streams(batch)} if samples > 1 else None
            asked = [list(prompts[pairs[k][0]]) for k in batch]
            return {"prompts": asked, "ends": sorted(ends), "max_new_tokens": wanted.max_new_tokens, "drawn": drawn}

        def compute(batch: Batch) -> list[list[int]]:
            asked = [prompts[pairs[k][0]] for k in batch]
            draw = token_choice.Draw(streams(batch), wanted.temperature, max(map(len, asked))) if samples > 1 else None
            return scoring.generate(self.model, asked, ends, wanted.max_new_tokens, self.pad, draw)

        lengths = [len(prompts[i]) for i, _ in pairs]
        batches = micro_batches(list(range(len(pairs))), lengths, self.batch_rows)
        found = self._each("answers", batches, ask, compute)
        texts = [tokenizer.decode(tokens, skip_special_tokens=True).strip() for tokens in found]
        return [texts[start : start + samples] for start in range(0, len(texts), samples)]

    def label_scores(self, prompts: Sequence[Tokens], labels: Sequence[Tokens]) -> list[list[float]]:
        """Log-probability in nats of each label (its ids, end of turn included) as the whole answer to each prompt."""
        asked_labels = [list(label) for label in labels]

        def ask(rows: Batch) -> dict[str, Any]:
            asked = [list(prompts[i]) for i in rows]
            return {"prompts": asked, "labels": asked_labels, "batch_rows": self.batch_rows}

        def compute(rows: Batch) -> list[list[float]]:
            return label_room.label_scores(
                self.model, [prompts[i] for i in rows], labels, self.batch_rows, self.pad
            )  # fmt: skip

        return self._each("label_scores", list(self._of_one_length(prompts)), ask, compute)

    def _of_one_length(self, rows: Sequence[Tokens]) -> Iterator[Batch]:
        """Batches in which nothing is filled, longest first."""
        by_length: dict[int, Batch] = {}
        for i, ids in enumerate(rows):
            by_length.setdefault(len(ids), []).append(i)
        for length in sorted(by_length, reverse=True):
            some = by_length[length]
            yield from (some[start : start + self.batch_rows] for start in range(0, len(some), self.batch_rows))

    def _each(
        self,
        kind: str,
        batches: Sequence[Batch],
        ask: Callable[[Batch], dict[str, Any]],
        compute: Callable[[Batch], Sequence[Any]],
    ) -> list[Any]:
        """What came of each row, in the order of the rows: from the store, or computed and stored.

        Args:
            kind: of the question.
            batches: all rows, each in one of them.
            ask: what a batch is asked, as JSON: the key of its results.
            compute: its results.
        """
        total, done = sum(map(len, batches)), 0
        found: list[Any] = [None] * total
        for batch in batches:
            key = f"{kind} {digests.of_json({'pad': self.pad, **ask(batch)})}"
            results = self.store.take(key, partial(compute, batch))
            for row, result in zip(batch, results, strict=True):
                found[row] = result
            done += len(batch)
            self.progress(done, total)
        return found


def _names(prompts: Sequence[Tokens]) -> list[str]:
    """A name for each prompt that does not depend on the others; equal ones are numbered, so that each draws anew."""
    seen: Counter[str] = Counter()
    names = []
    for prompt in prompts:
        fingerprint = digests.of_json(list(prompt))
        names.append(f"{fingerprint}/{seen[fingerprint]}")
        seen[fingerprint] += 1
    return names


# How many rows are scored at once: a power of two that follows from machine and model, the same every time.

MOST_ROWS = 64
"""More make nothing faster, and fill shorter rows for longer ones."""
SHARE = 0.5
"""Of the memory beside the weights that rows may take: others use the machine as well, and blocks are never packed
without gaps. What is free at the moment is not asked: scores move with the rows of a batch, if only by rounding."""


def rows_at_once(wanted: int | Literal["auto"], model: Model, longest_tokens: int, vocabulary: int) -> int:
    """Rows of a batch. `auto` takes the greatest power of two whose rows, all as long as the longest, should fit.

    Args:
        wanted: `machine` says it, or leaves it to us.
        model: loaded; its weights and its device count.
        longest_tokens: of any row that will be scored, generated tokens included.
        vocabulary: logits of a position.

    Returns:
        At least 1. Where even so many do not fit, memory runs out (model.memory.is_exhausted), and half as many may.
    """
    if wanted != "auto":
        return wanted
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model
    room = SHARE * (capacity.of(model.device).total_bytes - sum(t.nbytes for t in parameters.tensors_of(model)))
    rows = 1
    needed = bytes_of_row(whole.config.get_text_config(), longest_tokens, vocabulary)
    while rows < MOST_ROWS and 2 * rows * needed <= room:
        rows *= 2
    return rows


def bytes_of_row(config: Any, tokens: int, vocabulary: int) -> int:
    """Bound of what a row holds while it is scored without gradients, in bytes.

    Keys and values of all layers twice (a cache that grows is copied), the widest layer's inputs and outputs, attention
    scores if they are written out, and some copies of the logits of one position; all in float32. Wider pieces of
    logits are bounded for a batch as a whole (model.columns.CHUNK_ELEMENTS).
    """
    hidden = int(config.hidden_size)
    layers = int(config.num_hidden_layers)
    heads = int(getattr(config, "num_attention_heads", None) or 1)
    inner = _widest(config, "intermediate_size", 4 * hidden)
    key_heads = _widest(config, "num_key_value_heads", heads)
    head = int(getattr(config, "head_dim", None) or -(-hidden // heads))
    cache = 2 * 2 * layers * key_heads * head * tokens
    width = (8 * hidden + 3 * inner) * tokens
    scores = 2 * heads * tokens * tokens if getattr(config, "_attn_implementation", None) == "eager" else 0
    return 4 * (cache + width + scores + 4 * vocabulary)


def _widest(config: Any, name: str, otherwise: int) -> int:
    """A size that some models give layer by layer."""
    found = getattr(config, name, None)
    return int(max(found) if isinstance(found, list | tuple) else found or otherwise)
