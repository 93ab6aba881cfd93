"""Converts a tokenizer to the metadata of a GGUF file, or refuses if llama.cpp would tokenize differently.

The tokenizer is read as transformers opens it, not from its files: transformers rebuilds the pre-tokenizer of some
classes regardless of tokenizer.json, and the model was trained with the result. If llama.cpp lacks a behavior, the
tokenizer is refused, or a note is written if few texts are affected. llama.cpp's behavior is in `src/llama-vocab.cpp`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, TokenType
from tokenizers import models, pre_tokenizers

from ratchet.errors import BaseModelError
from ratchet.models import base_model

ENDS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",  # noqa: RUF001
})  # fmt: skip
"""Names of tokens at which llama.cpp ends an answer, even if the file does not list them as end tokens."""
STRIPPED_BY_NAME = ("phi-3", "phi3")
"""Parts of model names for which llama.cpp drops spaces after all special tokens except `_NOT_STRIPPED`."""
SPACE = "▁"
BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_UNRANKED = -1000.0
"""Score of entries that are not the result of a merge: single characters, bytes and added tokens."""
_NOT_STRIPPED = {"<unk>", "<s>", "<|endoftext|>"}
_STRIP_NOTES = ("after special tokens llama.cpp drops spaces, tabs and line breaks, but no other Unicode spaces",)
_CASE_NOTE = (
    "llama.cpp distinguishes upper and lower case in a-z only: it splits words with other cased letters (straßeÜbung) "
    "and marks combined with letters differently"
)


@dataclass(frozen=True)
class GgufVocabulary:
    """Tokenizer metadata of a GGUF file."""

    model: str
    """`gpt2` (merges of bytes) or `llama` (merges of characters, by score)."""
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
    """Whether spaces after special tokens are dropped, which llama.cpp does only for certain model names."""
    notes: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class GgufTokenizerModel:
    """Parameters of a tokenizer of a kind that llama.cpp supports."""

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
    """Whether added tokens are matched after spaces are replaced by ▁; a ▁ in an added token then means a space."""
    notes: tuple[str, ...] = ()

    def scores(self, tokens: Sequence[str], types: Sequence[int]) -> list[float] | None:
        """Return the scores of all entries, higher for earlier merges; None for a tokenizer without scores."""
        if self.ranks is None:
            return None
        order = {text: -float(i) for i, text in enumerate(sorted(self.ranks, key=self.ranks.__getitem__))}
        normal = int(TokenType.NORMAL)
        return [order.get(text, _UNRANKED) if types[i] == normal else _UNRANKED for i, text in enumerate(tokens)]


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
    if keys := [key for key in ("continuing_subword_prefix", "end_of_word_suffix") if document["model"].get(key)]:
        raise unrepresentable_error(where, f"it has a {keys[0]}")
    added = {token["id"]: token for token in document["added_tokens"]}
    strips_spaces = _strips_spaces(list(added.values()), where)
    starts_plain, add_bos, add_eos, placement_notes = _place_special_tokens(tokenizer, where)
    if any(step["type"] == "ByteLevel" for step in sequence_steps(document["pre_tokenizer"], "pretokenizers")):
        model = _read_byte_level(document, where)
    else:
        model = read_byte_fallback(document, starts_plain, where)
    tokens, types = _entries(document["model"]["vocab"], added, model, size, where)
    special, notes = _special_token_ids(tokenizer, tokens, directory)
    return GgufVocabulary(
        model.model, model.pre, tokens, types, model.merges, model.scores(tokens, types), special, add_bos, add_eos,
        model.space_prefix, _adapt_chat_template(tokenizer, model.needs_leading_space), strips_spaces,
        (*model.notes, *placement_notes, *notes, *(_STRIP_NOTES if strips_spaces else ())),
    )  # fmt: skip


def _strips_spaces(added: Sequence[Mapping[str, Any]], where: str) -> bool:
    """Return whether special tokens absorb the spaces after them. llama.cpp has only one rule; others are refused."""
    for token in added:
        if token["single_word"] or token["lstrip"]:
            raise unrepresentable_error(
                where, f"its added token {token['content']} has {'lstrip' if token['lstrip'] else 'single_word'}"
            )
    stripping = {token["content"] for token in added if token["rstrip"]}
    names = {token["content"] for token in added}
    if stripping and (stripping != names - _NOT_STRIPPED or not names >= {*_NOT_STRIPPED, "</s>"}):
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
        tokens[i] = text
        types[i] = int(TokenType.BYTE if model.ranks is not None and BYTE.fullmatch(text) else TokenType.NORMAL)
    for i, token in added.items():
        tokens[i] = token["content"]
        if model.is_unescaped and token["normalized"]:  # llama.cpp matches it in texts whose spaces are not replaced
            tokens[i] = tokens[i].replace(SPACE, " ")
        types[i] = int(TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED)
    if model.unknown is not None and model.unknown in tokens:
        types[tokens.index(model.unknown)] = int(TokenType.UNKNOWN)
    if len(set(tokens)) < size:
        duplicate = next(text for i, text in enumerate(tokens) if text in tokens[:i])
        raise unrepresentable_error(where, f"two of its entries are {duplicate!r}")
    return tokens, types


def _place_special_tokens(tokenizer: Any, where: str) -> tuple[bool | None, bool, bool, list[str]]:
    """Determine the special tokens around a text.

    Returns:
        Whether conversations begin with neither a special token nor a space (None: no chat template), whether llama.cpp
        adds bos and eos to a text, and notes.
    """
    plain: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
    wrapped: list[int] = tokenizer("a")["input_ids"]
    start = next((i for i in range(len(wrapped)) if wrapped[i : i + len(plain)] == plain), None)
    if start is None:
        raise unrepresentable_error(where, "special tokens around a text change the tokens of the text")
    prefix, suffix = wrapped[:start], wrapped[start + len(plain) :]
    add_bos, notes = prefix == [tokenizer.bos_token_id], []
    if prefix and not add_bos:
        notes.append(f"llama.cpp omits {len(prefix)} tokens that transformers puts before a text")
    if not tokenizer.chat_template:
        return None, add_bos, suffix == [tokenizer.eos_token_id], notes
    question = [{"role": "user", "content": "a"}]
    try:
        chat: str = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program that can fail in any way
        raise BaseModelError(
            f"{where}: the chat template fails for a plain question: {error}; fix the template"
        ) from None
    if add_bos and not chat.startswith(tokenizer.bos_token):
        # llama.cpp's server tokenizes a conversation like any text, so it would add bos, which training did not.
        add_bos = False
        notes.append(f"{tokenizer.bos_token} is not put before texts, because the chat template begins without it")
    starts = (" ", *(token.content for token in tokenizer.added_tokens_decoder.values()))
    return not chat.startswith(starts), add_bos, False, notes


def _special_token_ids(
    tokenizer: Any, tokens: Sequence[str], directory: Path
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return token ids by role, and notes. llama.cpp supports three end tokens, plus tokens with names in ENDS."""
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
    return [] if value is None else [value] if isinstance(value, int) else [int(token_id) for token_id in value]


def _adapt_chat_template(tokenizer: Any, needs_leading_space: bool) -> str | list[dict[str, str]] | None:
    template = tokenizer.chat_template
    if not template:
        return None
    by_name: dict[str, str] = template if isinstance(template, dict) else {"default": template}
    prefix = "{{ ' ' }}" if needs_leading_space else ""
    if tokenizer.bos_token is None and any("bos_token" in text for text in by_name.values()):
        prefix = "{%- set bos_token = '' -%}" + prefix
    by_name = {name: prefix + text for name, text in by_name.items()}
    if set(by_name) == {"default"}:
        return by_name["default"]
    return [{"name": name, "template": text} for name, text in by_name.items()]


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


def unrepresentable_error(where: str, found: str) -> BaseModelError:
    """Create the error for a tokenizer that llama.cpp cannot reproduce."""
    return BaseModelError(
        f"{where}: GGUF cannot represent this tokenizer: {found}, and llama.cpp has no equivalent; remove all types "
        "from export.gguf.types"
    )


def sequence_steps(part: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    """List the steps of a pre-tokenizer or normalizer in order; a part that is not a sequence is one step."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [step for inner in part[key] for step in sequence_steps(inner, key)]
    return [part]


def parse_merges(merges: Sequence[str | Sequence[str]]) -> list[tuple[str, str]]:
    """Parse the merges of tokenizer.json, which are strings with a space or pairs of strings."""
    pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in merges)
    return [(left, right) for left, right in pairs]


# Tokenizers with byte-level BPE.
#
# GGUF contains no pattern for splitting texts, only the name (`tokenizer.ggml.pre`) of a pattern that is built into
# llama.cpp. A wrong name is hard to notice, because most texts are still split into the same tokens. So the rules in
# tokenizer.json are converted to a list of patterns that apply one after another. RULES maps such lists to names.


ALPHABET = frozenset(pre_tokenizers.ByteLevel.alphabet())
"""Characters that represent bytes in a byte-level vocabulary (Radford et al. 2019)."""
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""Pattern of Radford et al. 2019, the default of ByteLevel."""
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


@dataclass(frozen=True)
class PreTokenizerRule:
    """A pre-tokenizer of llama.cpp."""

    name: str
    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """Whether a word that is in the vocabulary becomes one token before any merge."""
    note: str | None = None
    """Difference between llama.cpp and transformers, for users of the file."""


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


def _read_byte_level(document: Mapping[str, Any], where: str) -> GgufTokenizerModel:
    model, notes = document["model"], []
    rule = find_rule(document, where)
    normalizers = sequence_steps(document["normalizer"], "normalizers")
    if any(step["type"] != "NFC" for step in normalizers):
        raise unrepresentable_error(where, f"it normalizes texts by {', '.join(step['type'] for step in normalizers)}")
    if normalizers:
        notes.append("llama.cpp does not compose characters (NFC): texts in decomposed form get other tokens")
    if rule.note:
        notes.append(rule.note)
    if missing := ALPHABET - model["vocab"].keys():
        raise unrepresentable_error(where, f"its vocabulary lacks {len(missing)} of 256 bytes")
    merges = [" ".join(pair) for pair in parse_merges(model["merges"])]
    return GgufTokenizerModel("gpt2", rule.name, merges=merges, notes=tuple(notes))


def find_rule(document: Mapping[str, Any], where: str) -> PreTokenizerRule:
    """Return llama.cpp's rule that splits texts as a tokenizer does.

    Args:
        document: content of tokenizer.json with a BPE model.
        where: prefix of error messages.

    Raises:
        BaseModelError: llama.cpp has no such rule.
    """
    patterns = _split_patterns(document["pre_tokenizer"], where)
    matching = [rule for rule in RULES if rule.patterns == patterns]
    if not matching:
        shown = "; ".join(patterns)
        raise unrepresentable_error(where, f"it splits texts by {shown if len(shown) <= 400 else shown[:400] + ' ...'}")
    ignore_merges = bool(document["model"].get("ignore_merges"))
    for rule in matching:
        if rule.ignore_merges == ignore_merges:
            return rule
    # If merges produce every entry of the vocabulary, ignore_merges has no effect.
    vocabulary = document["model"]["vocab"]
    bpe = models.BPE(dict(vocabulary), parse_merges(document["model"]["merges"]))
    words = vocabulary.keys() - {token["content"] for token in document["added_tokens"]}
    if any(len(bpe.tokenize(word)) != 1 for word in words):
        raise unrepresentable_error(
            where, f"it uses rule `{matching[0].name}` with ignore_merges: {str(ignore_merges).lower()}"
        )
    return matching[0]


def _split_patterns(pre_tokenizer: Mapping[str, Any] | None, where: str) -> tuple[str, ...]:
    """Return the patterns by which a pre-tokenizer splits texts, in order."""
    steps = sequence_steps(pre_tokenizer, "pretokenizers")
    if not steps or steps[-1]["type"] != "ByteLevel":
        raise unrepresentable_error(where, f"its pre-tokenizer ends with {steps[-1]['type'] if steps else 'nothing'}")
    patterns = [_split_pattern(step, where) for step in steps[:-1]]
    if steps[-1].get("add_prefix_space"):
        raise unrepresentable_error(where, "it inserts a space before every text (add_prefix_space)")
    return (*patterns, GPT2) if steps[-1].get("use_regex", True) else tuple(patterns)


def _split_pattern(step: Mapping[str, Any], where: str) -> str:
    if step["type"] == "Digits":
        return r"\p{N}" if step["individual_digits"] else r"\p{N}+"
    if step["type"] == "Split" and "Regex" in step["pattern"]:
        pattern = str(step["pattern"]["Regex"])
        behavior = (step["behavior"], step["invert"])
        # "Removed" drops text that does not match. A pattern that ends with _SPACES matches all text.
        if behavior == ("Isolated", False) or (behavior == ("Removed", True) and pattern.endswith(_SPACES)):
            return pattern
    raise unrepresentable_error(
        where, f"its pre-tokenizer has the step {', '.join(f'{key} {value}' for key, value in step.items())}"
    )


# Tokenizers with byte fallback.
#
# These are tokenizers of the SentencePiece kind: pieces of characters with scores, and bytes for all other text.
# transformers merges pairs by rank. llama.cpp merges the neighbors that form the piece with the highest score, as
# SentencePiece does (Kudo and Richardson 2018). Both give the same tokens if every way to form a piece is among the
# merges. This is true for merges derived from a SentencePiece model. The rank of a piece's first merge gives its score.
#
# The space before a text: llama.cpp inserts a space before every text that follows a special token
# (`add_space_prefix`), or nowhere. transformers also has `first`: only before a text that begins without a special
# token. For `first`, the file says "nowhere". Conversations that begin with a special token are then correct; for other
# conversations, the chat template inserts the space. Without a chat template, llama.cpp inserts the space.


def read_byte_fallback(document: Mapping[str, Any], starts_plain: bool | None, where: str) -> GgufTokenizerModel:
    """Convert a tokenizer with byte fallback.

    Args:
        document: content of tokenizer.json.
        starts_plain: whether conversations begin without a special token; None: the tokenizer has no chat template.
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
    if is_unescaped and any(token["normalized"] and SPACE in token["content"] for token in document["added_tokens"]):
        notes += (f"transformers treats a {SPACE} in a text as a space, llama.cpp as a letter",)
    merges = parse_merges(model["merges"])
    added = {token["content"] for token in document["added_tokens"]}
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
    normalizers = [_describe_normalizer(step) for step in sequence_steps(document["normalizer"], "normalizers")]
    splits = sequence_steps(document["pre_tokenizer"], "pretokenizers")
    replace = f"Replace ' ' {SPACE}"
    if normalizers in ([replace], [f"Prepend {SPACE}", replace]):
        # A pre-tokenizer that splits at spaces has no effect, because the normalizer has replaced all spaces.
        if not all(step["type"] == "Split" and step["pattern"] == {"String": " "} for step in splits):
            raise unrepresentable_error(where, f"its pre-tokenizer has the step {splits[0]['type']}")
        has_prefix = len(normalizers) == 2
        normalized = [token["content"] for token in document["added_tokens"] if token["normalized"]]
        if has_prefix and normalized:
            raise unrepresentable_error(
                where, f"its added token {normalized[0]} is matched only after a space is inserted (normalized)"
            )
        return ("all" if has_prefix else "nowhere"), True
    if not normalizers and len(splits) == 1 and splits[0]["type"] == "Metaspace":
        if splits[0]["replacement"] != SPACE or splits[0].get("split", True):
            raise unrepresentable_error(where, "it splits texts at spaces before it merges (Metaspace, split)")
        scheme = str(splits[0]["prepend_scheme"])
        return {"never": "nowhere"}.get(scheme, scheme), False
    shown = ", ".join([*normalizers, *(step["type"] for step in splits)]) or "nothing"
    raise unrepresentable_error(where, f"it handles spaces by {shown}")


def _describe_normalizer(step: Mapping[str, Any]) -> str:
    if step["type"] == "Prepend":
        return f"Prepend {step['prepend']}"
    if step["type"] == "Replace" and "String" in step["pattern"]:
        return f"Replace {step['pattern']['String']!r} {step['content']}"
    return str(step["type"])


def _require_complete_merges(pieces: set[str], merges: Sequence[tuple[str, str]], where: str) -> None:
    """Check that each pair of pieces that forms a piece is a merge, because llama.cpp merges any such neighbors."""
    merged_pairs = set(merges)
    for piece in pieces:
        if BYTE.fullmatch(piece):
            continue
        for i in range(1, len(piece)):
            pair = (piece[:i], piece[i:])
            if pair not in merged_pairs and pair[0] in pieces and pair[1] in pieces:
                raise unrepresentable_error(where, f"it never merges {pair[0]!r} and {pair[1]!r} to {piece!r}")
