"""A larger model that is asked about given answers: its most probable tokens at every position that is learned from."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ratchet.config.train import DistillSettings, Train
from ratchet.config.units import format_bytes
from ratchet.data.batches import TokenRows
from ratchet.data.conversation import MASKED
from ratchet.errors import DataError, SettingsError
from ratchet.models import base_model, loading, model_spec, vocabulary
from ratchet.models.chunked_loss import DeferredHeadPass, SelectedPositionsPass
from ratchet.models.device import Model
from ratchet.models.loss import ALL, SOME, SequenceBatch, StoredTeacherTargets
from ratchet.models.memory import capacity
from ratchet.models.model_spec import ModelSpec
from ratchet.models.teacher_reference import KEY

LEAST = -1e4
"""Logarithm of a probability that is next to nothing. It must not be -inf: the reverse direction divides by it."""
_BYTES = {"nf4": 0.53, "fp4": 0.53}
"""Of a weight in 4 bits, with its constants; others have the size of their type."""


@dataclass(frozen=True)
class TeacherCandidate:
    """A teacher that may teach, before its weights are loaded."""

    path: Path
    blueprint: ModelSpec
    tokens: int
    """Ids that both tokenizers give the same tokens: all of the base's. What a model has beyond them is padding."""
    rows: int
    """Of the teacher's embedding."""

    def weight_bytes(self, settings: DistillSettings, dtype: torch.dtype) -> int:
        """About what its weights need in memory."""
        return int(self.blueprint.parameters * _BYTES.get(settings.quantization, dtype.itemsize))

    def require_room(self, settings: Train, device: torch.device) -> None:
        """Raises SettingsError when its weights alone need more memory than there is."""
        needed = self.weight_bytes(settings.distill, loading.pick_dtype(settings.compute_dtype, device))
        if needed > (there := capacity.measure_device(device).available_bytes):
            raise SettingsError(
                f"{KEY}: its weights need about {format_bytes(needed)}, {format_bytes(there)} are at hand; set "
                "train.distill.quantization: nf4, ask it on a larger machine, or take a smaller teacher"
            )

    def base_rows(self, base: ModelSpec) -> int:
        """Of the base's embedding, with those that its added tokens need."""
        return max(base.embedding_rows, self.tokens)

    def padding(self, base: ModelSpec) -> str | None:
        """What is to be said where the embedding has another size than the base's."""
        return describe_embedding_padding(self.rows, self.base_rows(base), self.tokens)

    def require_length(self, rows: TokenRows) -> None:
        """Raises DataError when a row is longer than the teacher can read."""
        most = getattr(self.blueprint.config.get_text_config(), "max_position_embeddings", None)
        if most and len(rows) and int(rows.lengths.max()) > most:
            raise DataError(
                f"{KEY}: training row {int(rows.lengths.argmax())} has {int(rows.lengths.max())} tokens, and the "
                f"teacher reads {most} at most; set prepare.max_tokens: {most}, or take another teacher"
            )


@dataclass(frozen=True)
class TeacherPredictions:
    """What it says at the learned positions of some rows, in the rows' order."""

    tokens: Tensor
    """int32 [positions, k], most probable first, on the CPU."""
    log_probabilities: Tensor
    """float16 [positions, k + 1]: of the tokens, and of all others together, at the temperature."""
    loss: float
    """Sum over positions of the given tokens' negative log-likelihood, in nats, at temperature 1."""
    left_out: float
    """Sum over positions of the probability of all other tokens."""


def inspect_teacher(path: Path, named: str, tokenizer: Any, settings: DistillSettings) -> TeacherCandidate:
    """Look at a teacher without loading it.

    Args:
        path: its directory.
        named: as params.yaml has it.
        tokenizer: of the base, with the tokens that were added to it.
        settings: top_k is read.

    Raises:
        BaseModelError: there is no model, or one that cannot be read.
        SettingsError: its tokens are not those of the base, or fewer than top_k.
    """
    base_model.list_model_files(path)
    plan = model_spec.load(path)
    plan.require_causal()
    known = vocabulary.required_rows(tokenizer)
    _require_same_vocabulary(tokenizer.get_vocab(), base_model.open_tokenizer(path).get_vocab(), named)
    rows = plan.embedding_rows
    if rows < known:
        raise SettingsError(
            f"{KEY}: {named}: its tokenizer knows ids up to {known - 1}, but the model has {rows} rows of embedding; "
            "bring the model that belongs to this tokenizer"
        )
    if settings.top_k is not None and settings.top_k >= known:
        raise SettingsError(f"train.distill.top_k: {settings.top_k}, but there are {known} tokens; set a smaller one")
    return TeacherCandidate(path, plan, known, rows)


def _require_same_vocabulary(base: Mapping[str, int], teacher: Mapping[str, int], named: str) -> None:
    """Raises SettingsError unless both tokenizers give the same ids to the same tokens."""
    if base == teacher:
        return
    different = sorted((id_, token) for token, id_ in base.items() if teacher.get(token) != id_)
    further = sorted((id_, token) for token, id_ in teacher.items() if token not in base)
    if different:
        id_, token = different[0]
        there = f"{teacher[token]} there" if token in teacher else "not known there"
        found = (
            f"{len(different)} of the base's {len(base):,} tokens are others, such as {token!r}: {id_} here, {there}"
        )
    else:
        found = f"it has {len(further)} tokens that the base lacks, such as {further[0][1]!r}"
    raise SettingsError(
        f"{KEY}: {named} has another tokenizer, so its probabilities are not those of the base's tokens: {found}. "
        "Name a teacher with the base's tokenizer (embeddings may be padded to another size), or let this one write "
        "answers and learn from those: `ratchet generate`"
    )


def describe_embedding_padding(teacher_rows: int, base_rows: int, tokens: int) -> str | None:
    """What is to be said of two embeddings for the same tokens; None where both have as many rows."""
    if teacher_rows == base_rows:
        return None
    return (
        f"embeddings have {teacher_rows:,} rows (teacher) and {base_rows:,} (base) for the same {tokens:,} tokens: the "
        "rest is padding, and is left out"
    )


def derive_teacher_settings(settings: Train) -> Train:
    """How a teacher is held, in the words for a base: its own quantisation, the training's type."""
    return Train(quantization=settings.distill.quantization, compute_dtype=settings.compute_dtype)


def take_top_k(numbers: Tensor, temperature: float, k: int) -> tuple[Tensor, Tensor]:
    """The k most probable tokens [positions, k], and logarithms [positions, k + 1] of theirs and of the rest's sum.

    Args:
        numbers: logits [positions, tokens] in float32.
    """
    soft = functional.log_softmax(numbers / temperature, dim=1)
    best = soft.topk(k, dim=1)
    rest = soft.scatter_(1, best.indices, -torch.inf).logsumexp(dim=1, keepdim=True)
    return best.indices, torch.cat([best.values, rest], dim=1).clamp_(min=LEAST)


def first_nonfinite_position(known: Tensor) -> int | None:
    """The first position [positions, ...] with a number that is none; None when all are."""
    if math.isfinite(float(known.sum())):
        return None
    return int((~torch.isfinite(known)).any(dim=1).nonzero()[0])


def nonfinite_answer_error(row: int, path: Path) -> DataError:
    """A teacher that answers a training row with NaN, as an error."""
    return DataError(
        f"{KEY}: {path} answers training row {row} with numbers that are not finite; set train.compute_dtype: float32, "
        "or take another teacher"
    )


class TeacherModel:
    """A teacher in memory."""

    def __init__(self, found: TeacherCandidate, settings: Train, device: torch.device) -> None:
        """Load it.

        Raises:
            SettingsError: the device lacks what settings ask for, or the model cannot be held so.
            BaseModelError: its files are damaged.
        """
        self.found, self.settings, self.device = found, settings.distill, device
        self.dtype = loading.pick_dtype(settings.compute_dtype, device)
        try:
            self.model: Model = loading.load(found.path, None, derive_teacher_settings(settings), device)
        except SettingsError as error:
            text = str(error).replace("train.quantization", "train.distill.quantization").replace(" (plain LoRA)", "")
            raise SettingsError(f"{KEY}: {text}") from None

    def say(self, rows: TokenRows, wanted: Sequence[int]) -> TeacherPredictions:
        """What it says about these rows, computed at once.

        Raises:
            DataError: it answers with NaN.
        """
        batch = SequenceBatch.of(rows, [[row] for row in wanted], self.device)
        targets = functional.pad(batch.labels[:, 1:], (0, 1), value=MASKED).flatten()
        places = (targets != MASKED).nonzero().squeeze(1)
        targets = targets[places]
        k = self.settings.top_k or 0  # on disk there is always one
        tokens, values = [torch.empty((0, k), dtype=torch.int32)], [torch.empty((0, k + 1), dtype=torch.float16)]
        if not len(places):
            return TeacherPredictions(tokens[0], values[0], 0.0, 0.0)
        loss = left_out = 0.0
        with torch.no_grad():
            for some, numbers in self._logits(batch, places):
                chosen = targets[some].unsqueeze(1)
                loss += float((numbers.logsumexp(dim=1) - numbers.gather(1, chosen)[:, 0]).sum(dtype=torch.float64))
                best, known = take_top_k(numbers, self.settings.temperature, k)
                if (bad := first_nonfinite_position(known)) is not None:
                    raise nonfinite_answer_error(
                        wanted[int(places[some][bad]) // batch.input_ids.shape[1]], self.found.path
                    )
                left_out += float(known[:, -1].exp().sum(dtype=torch.float64))
                tokens.append(best.to(torch.int32).cpu())
                values.append(known.to(torch.float16).cpu())
        return TeacherPredictions(torch.cat(tokens), torch.cat(values), loss, left_out)

    def _logits(self, batch: SequenceBatch, places: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Which of the places, and their logits [places, tokens] in float32, without the padding."""
        seen = SelectedPositionsPass(self.model, batch.input_ids, places, {}, cache=None, keep=False)
        for start, logits in seen.pieces():
            yield slice(start, start + logits.shape[1]), logits[0, :, : self.found.tokens].float()


# A teacher beside the student: what it says about a micro-batch is computed while the student learns from it.
#
# Its layers run once, before the student's, and leave the hidden states of the learned positions. Its head runs on as
# many of them at a time as the student's does (heads.py), so the logits of neither are ever there as a whole.
#
# What it says about a row depends on the micro-batch in its last bits, as the student's own sums do, and on nothing
# that
# was computed before: it is frozen, in evaluation mode, and keeps no cache.


@dataclass(frozen=True)
class OnlineTeacher:
    """A teacher that is asked about each micro-batch."""

    model: Model
    tokens: int
    """Ids that it shares with the student; what its embedding has beyond them is padding."""
    settings: DistillSettings
    path: Path
    """Where it lies, for messages."""

    def lesson(self, batch: SequenceBatch, row_of: Callable[[int], int]) -> "OnlineTeacherTargets":
        """Let it read a micro-batch.

        Args:
            batch: as the student gets it.
            row_of: the training row of a learned position, by its number in the micro-batch.
        """
        return OnlineTeacherTargets(self, batch, row_of)


class OnlineTeacherTargets:
    """What it says at the learned positions of one micro-batch; see `TeacherTargets`."""

    def __init__(self, teacher: OnlineTeacher, batch: SequenceBatch, row_of: Callable[[int], int]) -> None:
        self._teacher, self._row_of = teacher, row_of
        places = (functional.pad(batch.labels[:, 1:], (0, 1), value=MASKED).flatten() != MASKED).nonzero().squeeze(1)
        given = {} if batch.position_ids is None else {"position_ids": batch.position_ids}
        self._nothing = torch.empty((0, teacher.tokens), device=batch.labels.device)
        self._seen = None
        if len(places):
            with torch.no_grad():
                self._seen = DeferredHeadPass(teacher.model, batch.input_ids, places, given, cache=None, keep=False)

    @property
    def distributions(self) -> int:
        """See `TeacherTargets`."""
        return ALL if self._teacher.settings.top_k is None else SOME

    def some(self, positions: slice) -> StoredTeacherTargets:
        """Of a piece of the positions, computed now.

        Raises:
            DataError: the teacher answers with NaN.
        """
        told, first = self._teacher.settings, int(positions.start)
        with torch.no_grad():
            numbers = self._nothing
            if self._seen is not None:
                numbers = self._seen.between(first, int(positions.stop))[:, : self._teacher.tokens].float()
            tokens = None
            if told.top_k is None:
                known = functional.log_softmax(numbers / told.temperature, dim=1).clamp_(min=LEAST)
            else:
                tokens, known = take_top_k(numbers, told.temperature, told.top_k)
            if (bad := first_nonfinite_position(known)) is not None:
                raise nonfinite_answer_error(self._row_of(first + bad), self._teacher.path)
        return StoredTeacherTargets(tokens, known, told.weight, told.temperature, told.direction)
