"""Converts a tokenizer to the metadata of a GGUF file, or refuses if llama.cpp would tokenize differently.

The tokenizer is read as transformers opens it, not from its files: transformers rebuilds the pre-tokenizer of some
classes whatever tokenizer.json contains, and the model was trained with the result. Behavior that llama.cpp lacks is
refused, or noted if it concerns few texts. llama.cpp's behavior is in `src/llama-vocab.cpp`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, TokenType

from ratchet.errors import BaseModelError
from ratchet.models import base_model

# ------------------------------------------------------------------------------------ pre-tokenizers of byte-level BPE
#
# GGUF contains no pattern for splitting texts, only the name (`tokenizer.ggml.pre`) of a pattern that is built into
# llama.cpp. A wrong name goes unnoticed, because most texts are still split into the same tokens. So the rules in
# tokenizer.json are converted to a list of patterns that apply one after another, and looked up among llama.cpp's.

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""Radford et al. 2019; the default of ByteLevel."""
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
LLAMA3 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
QWEN2 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_SIGNS}|{_SPACES}"
QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_SLASHED = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_SLASHED}|{_SPACES}"
O200K = rf"{_CASED[0]}{_CONTRACTIONS}?|{_CASED[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_SLASHED}|{_SPACES}"
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",  # noqa: RUF001
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    + _SPACES,
)
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")

_CASE_NOTE = (
    "llama.cpp distinguishes upper and lower case in a-z only: it splits words with other cased letters (straßeÜbung) "
    "and marks combined with letters differently"
)


@dataclass(frozen=True)
class PreTokenizerRule:
    """A pre-tokenizer of llama.cpp."""

    name: str
    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """Whether a word that is in the vocabulary becomes one token before any merge."""
    note: str | None = None


RULES = (
    PreTokenizerRule("gpt-2", (GPT2,)),
    PreTokenizerRule("smollm", (r"\p{N}", GPT2)),
    PreTokenizerRule("llama-bpe", (LLAMA3,), ignore_merges=True),
    PreTokenizerRule("smaug-bpe", (LLAMA3,)),
    PreTokenizerRule("qwen2", (QWEN2,)),
    PreTokenizerRule("qwen35", (QWEN35,)),
    PreTokenizerRule("deepseek-v3", DEEPSEEK3),
    PreTokenizerRule("deepseek-coder", DEEPSEEK_CODER),
    PreTokenizerRule("tekken", (TEKKEN,), ignore_merges=True, note=_CASE_NOTE),
    PreTokenizerRule("gpt-4o", (O200K,), note=_CASE_NOTE),
)


def find_rule(document: Mapping[str, Any], where: str) -> PreTokenizerRule:
    """Find llama.cpp's rule that splits texts as a tokenizer does.

    Args:
        document: content of tokenizer.json with a BPE model.
        where: prefix of error messages.

    Raises:
        BaseModelError: llama.cpp has no such rule.
    """
    patterns = _patterns(document["pre_tokenizer"], where)
    matching = [rule for rule in RULES if rule.patterns == patterns]
    if not matching:
        shown = "; ".join(patterns)
        raise unrepresentable_error(where, f"it splits texts by {shown if len(shown) <= 400 else shown[:400] + ' ...'}")
    ignore_merges = bool(document["model"].get("ignore_merges"))
    for rule in matching:
        if rule.ignore_merges == ignore_merges:
            return rule
    if not _is_reachable_by_merges(document):  # otherwise ignore_merges has no effect
        raise unrepresentable_error(
            where, f"it uses rule `{matching[0].name}` with ignore_merges: {str(ignore_merges).lower()}"
        )
    return matching[0]


def unrepresentable_error(where: str, found: str) -> BaseModelError:
    """Create the error for a tokenizer that llama.cpp cannot reproduce."""
    return BaseModelError(
        f"{where}: GGUF cannot represent this tokenizer: {found}, and llama.cpp has no equivalent; remove all types "
        "from export.gguf.types"
    )


def _patterns(pre_tokenizer: Mapping[str, Any] | None, where: str) -> tuple[str, ...]:
    steps = sequence_steps(pre_tokenizer, "pretokenizers")
    if not steps or steps[-1]["type"] != "ByteLevel":
        raise unrepresentable_error(where, f"its pre-tokenizer ends with {steps[-1]['type'] if steps else 'nothing'}")
    patterns = [_pattern(step, where) for step in steps[:-1]]
    if steps[-1].get("add_prefix_space"):
        raise unrepresentable_error(where, "it inserts a space before every text (add_prefix_space)")
    return (*patterns, GPT2) if steps[-1].get("use_regex", True) else tuple(patterns)


def sequence_steps(part: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    """List the steps of a pre-tokenizer or normalizer in order; a part that is not a sequence is one step."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [step for one in part[key] for step in sequence_steps(one, key)]
    return [part]


def _pattern(step: Mapping[str, Any], where: str) -> str:
    if step["type"] == "Digits":
        return r"\p{N}" if step["individual_digits"] else r"\p{N}+"
    if step["type"] == "Split" and "Regex" in step["pattern"]:
        pattern = str(step["pattern"]["Regex"])
        behavior = (step["behavior"], step["invert"])
        # "Removed" drops text that does not match; there is none if the pattern matches everything.
        if behavior == ("Isolated", False) or (behavior == ("Removed", True) and pattern.endswith(_SPACES)):
            return pattern
    raise unrepresentable_error(
        where, f"its pre-tokenizer has the step {', '.join(f'{key} {value}' for key, value in step.items())}"
    )


def parse_merges(merges: Sequence[str | Sequence[str]]) -> list[tuple[str, str]]:
    """Parse the merges of tokenizer.json, which are strings with a space or pairs of strings."""
    pairs = (one.split(" ", 1) if isinstance(one, str) else one for one in merges)
    return [(left, right) for left, right in pairs]


def _is_reachable_by_merges(document: Mapping[str, Any]) -> bool:
    """Whether merges produce every entry of the vocabulary, so that ignore_merges has no effect."""
    from tokenizers import models

    vocabulary = document["model"]["vocab"]
    bpe = models.BPE(dict(vocabulary), parse_merges(document["model"]["merges"]))
    words = vocabulary.keys() - {one["content"] for one in document["added_tokens"]}
    return all(len(bpe.tokenize(word)) == 1 for word in words)


# ------------------------------------------------------------------------------- tokenizers with byte fallback
#
# These are tokenizers of the SentencePiece kind: pieces of characters with scores, and bytes for all other text.
# transformers merges pairs by rank. llama.cpp merges the neighbors that form the piece with the highest score, as
# SentencePiece does (Kudo and Richardson 2018). Both give the same tokens if every way to form a piece is among the
# merges, which holds for merges derived from a SentencePiece model. The rank of a piece's first merge is its score.
#
# The space before a text: llama.cpp inserts one before all text after a special token (`add_space_prefix`), or nowhere.
# transformers also has `first`: only before a text that begins without a special token. Conversations that begin with a
# special token are then correct with "nowhere"; for the others the chat template inserts the space.

SPACE = "▁"
BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_UNRANKED = -1000.0
"""Score of entries that no merge forms: single characters, bytes and added tokens."""


def _byte_alphabet() -> frozenset[str]:
    """Characters that represent bytes in a byte-level vocabulary (Radford et al. 2019)."""
    from tokenizers import pre_tokenizers

    return frozenset(pre_tokenizers.ByteLevel.alphabet())


ALPHABET = _byte_alphabet()


@dataclass(frozen=True)
class GgufTokenizerModel:
    """A tokenizer of a kind that llama.cpp supports, and its parameters."""

    model: str
    pre: str
    merges: list[str] | None = None
    ranks: Mapping[str, int] | None = None
    """Index of each piece's first merge."""
    unknown: str | None = None
    space_prefix: bool | None = None
    needs_leading_space: bool = False
    """Whether the chat template must begin with a space."""
    is_unescaped: bool = False
    """Whether added tokens are matched after spaces became ▁, so that a ▁ in them is a space."""
    notes: tuple[str, ...] = ()

    def token_type(self, text: str) -> TokenType:
        """GGUF's type of an entry that is not an added token."""
        return TokenType.BYTE if self.ranks is not None and BYTE.fullmatch(text) else TokenType.NORMAL

    def added_token_text(self, added: Mapping[str, Any]) -> str:
        """The text of an added token as llama.cpp matches it: in the unchanged text."""
        text: str = added["content"]
        return text.replace(SPACE, " ") if self.is_unescaped and added["normalized"] else text

    def scores(self, tokens: Sequence[str], types: Sequence[int]) -> list[float] | None:
        """Scores of all entries, higher for earlier merges; None for a tokenizer without scores."""
        if self.ranks is None:
            return None
        order = {text: -float(i) for i, text in enumerate(sorted(self.ranks, key=self.ranks.__getitem__))}
        normal = int(TokenType.NORMAL)
        return [order.get(text, _UNRANKED) if types[i] == normal else _UNRANKED for i, text in enumerate(tokens)]


def read_byte_fallback(document: Mapping[str, Any], starts_plain: bool | None, where: str) -> GgufTokenizerModel:
    """Convert a tokenizer with byte fallback.

    Args:
        document: content of tokenizer.json.
        starts_plain: whether conversations begin without a special token; None: there is no chat template.
        where: prefix of error messages.

    Raises:
        BaseModelError: llama.cpp would tokenize differently.
    """
    model = document["model"]
    if missing := [i for i in range(256) if f"<0x{i:02X}>" not in model["vocab"]]:
        raise unrepresentable_error(
            where, f"its vocabulary lacks <0x{missing[0]:02X}>, so some texts cannot be encoded as bytes"
        )
    prefix, is_unescaped = _space_placement(document, where)
    notes: tuple[str, ...] = ()
    if prefix == "always":
        notes = ("llama.cpp also inserts a space before a text that begins with a space; transformers does not",)
    if prefix == "first":
        difference = "inserts none" if starts_plain is not None else "also inserts one after special tokens"
        notes = (
            f"transformers inserts a space before a text that begins without a special token; llama.cpp {difference}",
        )
    if is_unescaped and any(one["normalized"] and SPACE in one["content"] for one in document["added_tokens"]):
        notes += (f"transformers treats a {SPACE} in a text as a space, llama.cpp as a letter",)
    merges = parse_merges(model["merges"])
    added = {one["content"] for one in document["added_tokens"]}
    _require_complete_merges(model["vocab"].keys() - added, merges, where)
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    return GgufTokenizerModel(
        "llama", "default", ranks=ranks, unknown=model.get("unk_token"), notes=notes, is_unescaped=is_unescaped,
        space_prefix=prefix in ("all", "always") or (prefix == "first" and starts_plain is None),
        needs_leading_space=prefix == "first" and starts_plain is True,
    )  # fmt: skip


def _space_placement(document: Mapping[str, Any], where: str) -> tuple[str, bool]:
    """Determine where the tokenizer inserts a space, and whether its normalizer replaces spaces by ▁.

    Returns:
        `nowhere`, `all` (before all fragments), `always` (but not before a space) or `first`; and whether the
        normalizer replaces spaces.
    """
    normalizers = [_describe_normalizer(one) for one in sequence_steps(document["normalizer"], "normalizers")]
    splits = sequence_steps(document["pre_tokenizer"], "pretokenizers")
    replace = f"Replace ' ' {SPACE}"
    if normalizers in ([replace], [f"Prepend {SPACE}", replace]):
        # A pre-tokenizer that splits at spaces has no effect, because the normalizer has replaced all spaces.
        if not all(one["type"] == "Split" and one["pattern"] == {"String": " "} for one in splits):
            raise unrepresentable_error(where, f"its pre-tokenizer has the step {splits[0]['type']}")
        has_prefix = len(normalizers) == 2
        if has_prefix and (normalized := [one["content"] for one in document["added_tokens"] if one["normalized"]]):
            raise unrepresentable_error(
                where, f"its added token {normalized[0]} is matched only after a space is inserted (normalized)"
            )
        return ("all" if has_prefix else "nowhere"), True
    if not normalizers and len(splits) == 1 and splits[0]["type"] == "Metaspace":
        if splits[0]["replacement"] != SPACE or splits[0].get("split", True):
            raise unrepresentable_error(where, "it splits texts at spaces before it merges (Metaspace, split)")
        scheme = str(splits[0]["prepend_scheme"])
        return {"never": "nowhere"}.get(scheme, scheme), False
    shown = ", ".join([*normalizers, *(one["type"] for one in splits)]) or "nothing"
    raise unrepresentable_error(where, f"it handles spaces by {shown}")


def _describe_normalizer(step: Mapping[str, Any]) -> str:
    if step["type"] == "Prepend":
        return f"Prepend {step['prepend']}"
    if step["type"] == "Replace" and "String" in step["pattern"]:
        return f"Replace {step['pattern']['String']!r} {step['content']}"
    return str(step["type"])


def _require_complete_merges(pieces: set[str], merges: Sequence[tuple[str, str]], where: str) -> None:
    """Check that each pair of pieces that forms a piece is a merge, because llama.cpp merges any such neighbors."""
    known = set(merges)
    for piece in pieces:
        if BYTE.fullmatch(piece):
            continue
        for i in range(1, len(piece)):
            pair = (piece[:i], piece[i:])
            if pair not in known and pair[0] in pieces and pair[1] in pieces:
                raise unrepresentable_error(where, f"it never merges {pair[0]!r} and {pair[1]!r} to {piece!r}")


# ---------------------------------------------------------------------------------------------- the complete vocabulary

ENDS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",  # noqa: RUF001
})  # fmt: skip
"""Names of tokens at which llama.cpp ends an answer, whatever the file contains."""
STRIPPED_BY_NAME = ("phi-3", "phi3")
"""If a model's name contains one of these, llama.cpp drops spaces after all special tokens except three."""
_STRIP_NOTES = ("after special tokens llama.cpp drops spaces, tabs and line breaks, but no other Unicode spaces",)
_NOT_STRIPPED = {"<unk>", "<s>", "<|endoftext|>"}


@dataclass(frozen=True)
class GgufVocabulary:
    """Tokenizer metadata of a GGUF file."""

    model: str
    """gpt2 (merges of bytes) or llama (merges of characters, by score)."""
    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str] | None
    scores: list[float] | None
    special: dict[str, int]
    """Token ids by role: bos, eos, eot, eom, unk, pad."""
    add_bos: bool
    add_eos: bool
    space_prefix: bool | None
    template: str | list[dict[str, str]] | None
    strips_spaces: bool
    """Whether spaces after special tokens are dropped, which llama.cpp does only for certain names of models."""
    notes: tuple[str, ...] = field(default=())


def read_vocabulary(directory: Path, size: int) -> GgufVocabulary:
    """Read the tokenizer of a model directory.

    Args:
        directory: contains the tokenizer's files, and perhaps generation_config.json.
        size: rows of the embedding; ids without a token get placeholder entries.

    Raises:
        BaseModelError: the tokenizer cannot be read, or llama.cpp would tokenize differently.
    """
    tokenizer = base_model.open_tokenizer(directory)
    document = json.loads(tokenizer.backend_tokenizer.to_str())
    where = f"{directory}: tokenizer"
    if document["model"]["type"] != "BPE":
        raise unrepresentable_error(where, f"its model type is {document['model']['type']}")
    if parts := [one for one in ("continuing_subword_prefix", "end_of_word_suffix") if document["model"].get(one)]:
        raise unrepresentable_error(where, f"it has a {parts[0]}")
    added = {one["id"]: one for one in document["added_tokens"]}
    strips_spaces = _strips_spaces(list(added.values()), where)
    placement = _SpecialTokenPlacement(tokenizer, where)
    if any(one["type"] == "ByteLevel" for one in sequence_steps(document["pre_tokenizer"], "pretokenizers")):
        model = _read_byte_level(document, where)
    else:
        model = read_byte_fallback(document, placement.starts_plain, where)
    tokens, types = _entries(document["model"]["vocab"], added, model, size, where)
    special, notes = _special_token_ids(tokenizer, tokens, directory)
    return GgufVocabulary(
        model.model, model.pre, tokens, types, model.merges, model.scores(tokens, types), special, placement.add_bos,
        placement.add_eos, model.space_prefix, _adapt_chat_template(tokenizer, model.needs_leading_space),
        strips_spaces, (*model.notes, *placement.notes, *notes, *(_STRIP_NOTES if strips_spaces else ())),
    )  # fmt: skip


def _read_byte_level(document: Mapping[str, Any], where: str) -> GgufTokenizerModel:
    model, notes = document["model"], []
    rule = find_rule(document, where)
    normalizers = sequence_steps(document["normalizer"], "normalizers")
    if any(one["type"] != "NFC" for one in normalizers):
        raise unrepresentable_error(where, f"it normalizes texts by {', '.join(one['type'] for one in normalizers)}")
    if normalizers:
        notes.append("llama.cpp does not compose characters (NFC): texts in decomposed form get other tokens")
    if rule.note:
        notes.append(rule.note)
    if missing := ALPHABET - model["vocab"].keys():
        raise unrepresentable_error(where, f"its vocabulary lacks {len(missing)} of 256 bytes")
    merges = [" ".join(pair) for pair in parse_merges(model["merges"])]
    return GgufTokenizerModel("gpt2", rule.name, merges=merges, notes=tuple(notes))


def _strips_spaces(added: Sequence[Mapping[str, Any]], where: str) -> bool:
    """Whether special tokens absorb the spaces after them. llama.cpp has one such rule; any other is refused."""
    for one in added:
        if one["single_word"] or one["lstrip"]:
            raise unrepresentable_error(
                where, f"its added token {one['content']} has {'lstrip' if one['lstrip'] else 'single_word'}"
            )
    stripping = {one["content"] for one in added if one["rstrip"]}
    everything = {one["content"] for one in added}
    if stripping and (stripping != everything - _NOT_STRIPPED or not everything >= {*_NOT_STRIPPED, "</s>"}):
        raise unrepresentable_error(
            where, f"its added token {min(stripping)} absorbs the spaces after it (rstrip), but others do not"
        )
    return bool(stripping)


def _entries(
    vocabulary: Mapping[str, int],
    added: Mapping[int, Mapping[str, Any]],
    model: GgufTokenizerModel,
    size: int,
    where: str,
) -> tuple[list[str], list[int]]:
    tokens = [f"[PAD{i}]" for i in range(size)]
    types = [int(TokenType.UNUSED)] * size
    highest = max([*vocabulary.values(), *added])
    if highest >= size:
        raise BaseModelError(
            f"{where}: token {highest} has no row in the embedding, which has {size}; use the model's own tokenizer"
        )
    for text, i in vocabulary.items():
        tokens[i], types[i] = text, int(model.token_type(text))
    for i, one in added.items():
        tokens[i] = model.added_token_text(one)
        types[i] = int(TokenType.CONTROL if one["special"] else TokenType.USER_DEFINED)
    if model.unknown is not None and model.unknown in tokens:
        types[tokens.index(model.unknown)] = int(TokenType.UNKNOWN)
    if len(set(tokens)) < size:
        duplicate = next(text for i, text in enumerate(tokens) if text in tokens[:i])
        raise unrepresentable_error(where, f"two of its entries are {duplicate!r}")
    return tokens, types


class _SpecialTokenPlacement:
    """Special tokens that the tokenizer puts around a text, and the beginning of a conversation."""

    def __init__(self, tokenizer: Any, where: str) -> None:
        plain: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
        wrapped: list[int] = tokenizer("a")["input_ids"]
        start = next((i for i in range(len(wrapped)) if wrapped[i : i + len(plain)] == plain), None)
        if start is None:
            raise unrepresentable_error(where, "special tokens around a text change the tokens of the text")
        before, after = wrapped[:start], wrapped[start + len(plain) :]
        self.notes: tuple[str, ...] = ()
        chat = _render_conversation(tokenizer, where)
        self.starts_plain: bool | None = None if chat is None else not _starts_special(tokenizer, chat)
        """Whether conversations begin without a special token and without a space; None: no chat template."""
        self.add_bos = before == [tokenizer.bos_token_id]
        self.add_eos = after == [tokenizer.eos_token_id] and chat is None
        if before and not self.add_bos:
            self.notes += (f"llama.cpp omits {len(before)} tokens that transformers puts before a text",)
        if self.add_bos and chat is not None and not chat.startswith(tokenizer.bos_token):
            # llama.cpp's server tokenizes a conversation like any text, so it would add a token unseen in training.
            self.add_bos = False
            self.notes += (
                f"{tokenizer.bos_token} is not put before texts, because the chat template begins without it",
            )


def _render_conversation(tokenizer: Any, where: str) -> str | None:
    """Render a short conversation; None without a chat template."""
    if not tokenizer.chat_template:
        return None
    try:
        text: str = tokenizer.apply_chat_template(
            [{"role": "user", "content": "a"}], tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # a template is a program and can fail in any way
        raise BaseModelError(
            f"{where}: the chat template fails for a plain question: {error}; fix the template"
        ) from None
    return text


def _starts_special(tokenizer: Any, text: str) -> bool:
    """Whether a text begins with a special token, or with a space."""
    return text.startswith((" ", *(one.content for one in tokenizer.added_tokens_decoder.values())))


def _special_token_ids(
    tokenizer: Any, tokens: Sequence[str], directory: Path
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return token ids by role. llama.cpp supports three end tokens, plus tokens whose names look like ends."""
    ids = {role: getattr(tokenizer, f"{role}_token_id") for role in ("bos", "eos", "unk", "pad")}
    special = {role: int(i) for role, i in ids.items() if i is not None and i < len(tokens)}
    ends = _read_end_token_ids(directory)
    if "eos" not in special:
        if not ends:
            raise BaseModelError(
                f"{directory}: neither the tokenizer nor generation_config.json names an end-of-text token; add "
                "eos_token_id to generation_config.json"
            )
        special["eos"] = ends[0]
    special.setdefault("bos", special["eos"])  # llama.cpp would use token 11
    unnamed = [i for i in ends if i != special["eos"] and tokens[i] not in ENDS]
    special |= dict(zip(("eot", "eom"), unnamed, strict=False))
    notes = []
    if lost := [tokens[i] for i in unnamed[2:]]:
        notes.append(f"llama.cpp does not end an answer at {', '.join(lost)}")
    by_name = [text for i, text in enumerate(tokens) if text in ENDS and ends and i not in (*ends, special["eos"])]
    if by_name:
        notes.append(f"llama.cpp also ends an answer at {', '.join(by_name)}, because of the name")
    return special, tuple(notes)


def _read_end_token_ids(directory: Path) -> list[int]:
    file = directory / "generation_config.json"
    if not file.is_file():
        return []
    try:
        value = json.loads(file.read_bytes()).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise BaseModelError(f"{file}: cannot be parsed ({error}); restore the original file") from None
    return [] if value is None else [value] if isinstance(value, int) else [int(one) for one in value]


def _adapt_chat_template(tokenizer: Any, needs_leading_space: bool) -> str | list[dict[str, str]] | None:
    template = tokenizer.chat_template
    if not template:
        return None
    named = template if isinstance(template, dict) else {"default": template}
    prefix = "{{ ' ' }}" if needs_leading_space else ""
    if tokenizer.bos_token is None:
        prefix = "{%- set bos_token = '' -%}" + prefix if any("bos_token" in one for one in named.values()) else prefix
    named = {name: prefix + text for name, text in named.items()}
    if set(named) == {"default"}:
        only: str = named["default"]
        return only
    return [{"name": name, "template": text} for name, text in named.items()]


def write_metadata(writer: GGUFWriter, vocabulary: GgufVocabulary) -> None:
    """Write a tokenizer's metadata into a file."""
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    if vocabulary.scores is not None:
        writer.add_token_scores(vocabulary.scores)
    writer.add_token_types(vocabulary.types)
    if vocabulary.merges is not None:
        writer.add_token_merges(vocabulary.merges)
    for role, i in vocabulary.special.items():
        getattr(writer, f"add_{role}_token_id")(i)
    writer.add_add_bos_token(vocabulary.add_bos)
    writer.add_add_eos_token(vocabulary.add_eos)
    if vocabulary.space_prefix is not None:
        writer.add_add_space_prefix(vocabulary.space_prefix)
    if vocabulary.template is not None:
        writer.add_chat_template(vocabulary.template)
