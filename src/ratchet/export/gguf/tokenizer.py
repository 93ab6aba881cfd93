"""How a byte-level tokenizer divides a text before it merges, and llama.cpp's name for it.

GGUF holds no rule, only a name (`tokenizer.ggml.pre`) for rules that are built into llama.cpp (`src/llama-vocab.cpp`).
A wrong one goes unnoticed: most texts are cut into the same tokens. So the rules of tokenizer.json are written in one
form, a list of patterns that are applied one after another, and looked up among those that llama.cpp has; what is not
there cannot be carried.
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

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""Radford et al. 2019; what ByteLevel does by itself."""
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
    "llama.cpp tells capitals from small letters in a-z only: it divides words in which others change (straßeÜbung) "
    "and marks that are combined with letters otherwise"
)


@dataclass(frozen=True)
class PreTokenizerRule:
    """One of llama.cpp's."""

    name: str
    patterns: tuple[str, ...]
    whole_words: bool = False
    """A piece that is in the vocabulary is taken as it is, before any merge (`ignore_merges`)."""
    note: str | None = None


RULES = (
    PreTokenizerRule("gpt-2", (GPT2,)),
    PreTokenizerRule("smollm", (r"\p{N}", GPT2)),
    PreTokenizerRule("llama-bpe", (LLAMA3,), whole_words=True),
    PreTokenizerRule("smaug-bpe", (LLAMA3,)),
    PreTokenizerRule("qwen2", (QWEN2,)),
    PreTokenizerRule("qwen35", (QWEN35,)),
    PreTokenizerRule("deepseek-v3", DEEPSEEK3),
    PreTokenizerRule("deepseek-coder", DEEPSEEK_CODER),
    PreTokenizerRule("tekken", (TEKKEN,), whole_words=True, note=_CASE_NOTE),
    PreTokenizerRule("gpt-4o", (O200K,), note=_CASE_NOTE),
)


def find_rule(written: Mapping[str, Any], where: str) -> PreTokenizerRule:
    """The rule that divides texts as a tokenizer does.

    Args:
        written: tokenizer.json, of a BPE.
        where: for messages.

    Raises:
        BaseModelError: llama.cpp has none.
    """
    patterns = _patterns(written["pre_tokenizer"], where)
    found = [rule for rule in RULES if rule.patterns == patterns]
    if not found:
        shown = "; ".join(patterns)
        raise unrepresentable_error(
            where, f"it divides texts by {shown if len(shown) <= 400 else shown[:400] + ' ...'}"
        )
    whole_words = bool(written["model"].get("ignore_merges"))
    for rule in found:
        if rule.whole_words == whole_words:
            return rule
    if not _is_reachable_by_merges(written):  # then it makes no difference
        raise unrepresentable_error(
            where, f"ignore_merges is {str(whole_words).lower()}, with the rule `{found[0].name}`"
        )
    return found[0]


def unrepresentable_error(where: str, what: str) -> BaseModelError:
    """What to raise for a tokenizer that llama.cpp would imitate wrongly."""
    return BaseModelError(
        f"{where}: GGUF cannot represent this tokenizer: {what}, and llama.cpp has nothing that does the same; "
        "export no GGUF of it"
    )


def _patterns(pre_tokenizer: Mapping[str, Any] | None, where: str) -> tuple[str, ...]:
    steps = _pre_tokenizer_steps(pre_tokenizer)
    if not steps or steps[-1]["type"] != "ByteLevel":
        raise unrepresentable_error(where, f"its pre-tokenizer ends with {steps[-1]['type'] if steps else 'nothing'}")
    found = [_pattern(step, where) for step in steps[:-1]]
    if steps[-1].get("add_prefix_space"):
        raise unrepresentable_error(where, "it puts a space before every text (add_prefix_space)")
    return (*found, GPT2) if steps[-1].get("use_regex", True) else tuple(found)


def _pre_tokenizer_steps(pre_tokenizer: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    if pre_tokenizer is None:
        return []
    if pre_tokenizer["type"] == "Sequence":
        return [step for one in pre_tokenizer["pretokenizers"] for step in _pre_tokenizer_steps(one)]
    return [pre_tokenizer]


def _pattern(step: Mapping[str, Any], where: str) -> str:
    if step["type"] == "Digits":
        return r"\p{N}" if step["individual_digits"] else r"\p{N}+"
    if step["type"] == "Split" and "Regex" in step["pattern"]:
        pattern = str(step["pattern"]["Regex"])
        kept = (step["behavior"], step["invert"])
        # "Removed" of what does not match: nothing, where the pattern matches everything
        if kept == ("Isolated", False) or (kept == ("Removed", True) and pattern.endswith(_SPACES)):
            return pattern
    raise unrepresentable_error(where, f"its pre-tokenizer has {_format_step(step)}")


def _format_step(step: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in step.items())


def parse_merges(merges: Sequence[str | Sequence[str]]) -> list[tuple[str, str]]:
    """Merges of tokenizer.json, which writes each as one text or as two."""
    divided = (one.split(" ", 1) if isinstance(one, str) else one for one in merges)
    return [(left, right) for left, right in divided]


def _is_reachable_by_merges(written: Mapping[str, Any]) -> bool:
    """Whether merges make every entry that words can be, so that taking one whole changes nothing."""
    from tokenizers import models

    vocabulary = written["model"]["vocab"]
    bpe = models.BPE(dict(vocabulary), parse_merges(written["model"]["merges"]))
    words = vocabulary.keys() - {one["content"] for one in written["added_tokens"]}
    return all(len(bpe.tokenize(word)) == 1 for word in words)


# Tokenizers of the SentencePiece kind in GGUF: pieces of characters with scores, bytes for what is no piece.
#
# transformers merges pairs by rank, llama.cpp whichever neighbours make the piece of the highest score (as
# SentencePiece
# does, Kudo and Richardson 2018). Both do the same if every way to make a piece is among the merges, as it is when
# they
# were derived from a SentencePiece model; the rank of a piece's first merge is then its score.
#
# The space before a text: llama.cpp puts one before everything that follows a special token (`add_space_prefix`), or
# nowhere. transformers also knows `first`: only before a text that begins without one. Conversations that begin with a
# special token are then right with nowhere; for those that begin with words the chat template says the space itself.

SPACE = "▁"
BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_UNRANKED = -1000.0
"""Of entries that no merge makes; only single characters, bytes and added tokens are among them."""


def _byte_alphabet() -> frozenset[str]:
    """The characters that stand for bytes in a byte-level vocabulary (Radford et al. 2019)."""
    from tokenizers import pre_tokenizers

    return frozenset(pre_tokenizers.ByteLevel.alphabet())


ALPHABET = _byte_alphabet()


@dataclass(frozen=True)
class GgufTokenizerModel:
    """How texts are cut: a kind of tokenizer that llama.cpp has, and what it needs."""

    model: str
    pre: str
    merges: list[str] | None = None
    ranks: Mapping[str, int] | None = None
    """Of each piece: the place of its first merge."""
    unknown: str | None = None
    space_prefix: bool | None = None
    space_before_chat: bool = False
    """The chat template has to begin with a space."""
    unescaped: bool = False
    """Added tokens are looked for after spaces became ▁: those with ▁ mean spaces."""
    notes: tuple[str, ...] = ()

    def kind(self, text: str) -> TokenType:
        return TokenType.BYTE if self.ranks is not None and BYTE.fullmatch(text) else TokenType.NORMAL

    def text_of(self, added: Mapping[str, Any]) -> str:
        """An added token as llama.cpp looks for it: in the text as it is."""
        text: str = added["content"]
        return text.replace(SPACE, " ") if self.unescaped and added["normalized"] else text

    def scores_of(self, tokens: Sequence[str], types: Sequence[int]) -> list[float] | None:
        """The earlier a piece is merged, the higher; None for a kind without scores."""
        if self.ranks is None:
            return None
        order = {text: -float(i) for i, text in enumerate(sorted(self.ranks, key=self.ranks.__getitem__))}
        normal = int(TokenType.NORMAL)
        return [order.get(text, _UNRANKED) if types[i] == normal else _UNRANKED for i, text in enumerate(tokens)]


def sequence_steps(part: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    """Parts of a sequence, in order; one that is none is its only part."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [step for one in part[key] for step in sequence_steps(one, key)]
    return [part]


def read_byte_fallback(written: Mapping[str, Any], starts_plain: bool | None, where: str) -> GgufTokenizerModel:
    """How a tokenizer with byte fallback cuts texts.

    Args:
        written: tokenizer.json.
        starts_plain: whether conversations begin with words, not with a special token; None: there is no template.
        where: for messages.

    Raises:
        BaseModelError: llama.cpp cannot do the same.
    """
    model = written["model"]
    if missing := [i for i in range(256) if f"<0x{i:02X}>" not in model["vocab"]]:
        raise unrepresentable_error(
            where, f"<0x{missing[0]:02X}> is no entry, so not every text can be written in bytes"
        )
    prefix, replaces = _space_placement(written, where)
    notes: tuple[str, ...] = ()
    if prefix == "always":
        notes = ("llama.cpp puts a space before a text that begins with a space, too; transformers does not",)
    if prefix == "first":
        where_not = "before none" if starts_plain is not None else "after special tokens, too"
        notes = (f"transformers puts a space before a text that begins without special token, llama.cpp {where_not}",)
    if replaces and any(one["normalized"] and SPACE in one["content"] for one in written["added_tokens"]):
        notes += (f"a {SPACE} that stands in a text counts as a space for transformers, and as a letter for llama.cpp",)
    merges = parse_merges(model["merges"])
    added = {one["content"] for one in written["added_tokens"]}
    _require_complete_merges(model["vocab"].keys() - added, merges, where)
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    return GgufTokenizerModel(
        "llama", "default", ranks=ranks, unknown=model.get("unk_token"), notes=notes, unescaped=replaces,
        space_prefix=prefix in ("all", "always") or (prefix == "first" and starts_plain is None),
        space_before_chat=prefix == "first" and starts_plain is True,
    )  # fmt: skip


def _space_placement(written: Mapping[str, Any], where: str) -> tuple[str, bool]:
    """Where a space is put first: nowhere, all (fragments), always (but before a space), first; and who writes ▁."""
    normal = [_describe_normalizer(one) for one in sequence_steps(written["normalizer"], "normalizers")]
    cuts = sequence_steps(written["pre_tokenizer"], "pretokenizers")
    replace = f"Replace ' ' {SPACE}"
    if normal in ([replace], [f"Prepend {SPACE}", replace]):
        idle = all(one["type"] == "Split" and one["pattern"] == {"String": " "} for one in cuts)  # no space is left
        if not idle:
            raise unrepresentable_error(where, f"its pre-tokenizer has {cuts[0]['type']}")
        if len(normal) == 2 and (found := [one["content"] for one in written["added_tokens"] if one["normalized"]]):
            raise unrepresentable_error(
                where, f"{found[0]} is found only where a space would be put before it (normalized)"
            )
        return ("all" if len(normal) == 2 else "nowhere"), True
    if not normal and len(cuts) == 1 and cuts[0]["type"] == "Metaspace":
        if cuts[0]["replacement"] != SPACE or cuts[0].get("split", True):
            raise unrepresentable_error(where, "it divides texts at spaces before it merges (Metaspace, split)")
        scheme = str(cuts[0]["prepend_scheme"])
        return {"never": "nowhere"}.get(scheme, scheme), False
    shown = ", ".join([*normal, *(one["type"] for one in cuts)]) or "nothing"
    raise unrepresentable_error(where, f"what it does with spaces ({shown})")


def _describe_normalizer(step: Mapping[str, Any]) -> str:
    if step["type"] == "Prepend":
        return f"Prepend {step['prepend']}"
    if step["type"] == "Replace" and "String" in step["pattern"]:
        return f"Replace {step['pattern']['String']!r} {step['content']}"
    return str(step["type"])


def _require_complete_merges(pieces: set[str], merges: Sequence[tuple[str, str]], where: str) -> None:
    """llama.cpp joins any two neighbours that make a piece: each such pair must be a merge, too."""
    known = set(merges)
    for piece in pieces:
        if BYTE.fullmatch(piece):
            continue
        for i in range(1, len(piece)):
            pair = (piece[:i], piece[i:])
            if pair not in known and pair[0] in pieces and pair[1] in pieces:
                raise unrepresentable_error(where, f"{pair[0]!r} and {pair[1]!r} are never merged to {piece!r}")


# The tokenizer of a GGUF file: entries, their kinds, merges or scores, and when a text gets which token before it.
#
# Read from the tokenizer as transformers opens it, never from its files: transformers builds the pre-tokenizer of some
# classes anew, whatever tokenizer.json says, and that is what the model was trained with. Everything that llama.cpp
# would do otherwise is refused, or noted where it concerns few texts. What llama.cpp does is in `src/llama-vocab.cpp`.

ENDS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",  # noqa: RUF001
})  # fmt: skip
"""llama.cpp ends an answer at tokens of these names, whatever a file says."""
STRIPPED_BY_NAME = ("phi-3", "phi3")
"""In the name of a model: llama.cpp then drops spaces after special tokens, all but three."""
_STRIP_NOTES = ("after special tokens llama.cpp drops spaces, tabs and line breaks, but not the wider kinds of space",)
_NOT_STRIPPED = {"<unk>", "<s>", "<|endoftext|>"}


@dataclass(frozen=True)
class GgufVocabulary:
    """What a file says about its tokenizer."""

    model: str
    """gpt2 (merges of bytes) or llama (merges of characters, by score)."""
    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str] | None
    scores: list[float] | None
    special: dict[str, int]
    """Ids by their part: bos, eos, eot, eom, unk, pad."""
    add_bos: bool
    add_eos: bool
    space_prefix: bool | None
    template: str | list[dict[str, str]] | None
    strips: bool
    """Spaces after special tokens are dropped, which llama.cpp does only for a model of a certain name."""
    notes: tuple[str, ...] = field(default=())


def read_vocabulary(directory: Path, size: int) -> GgufVocabulary:
    """The tokenizer of a model's directory.

    Args:
        directory: with the tokenizer's files; generation_config.json is read where there is one.
        size: rows of the embedding; entries that the tokenizer does not have are filled in.

    Raises:
        BaseModelError: it cannot be read, or llama.cpp cannot do what it does.
    """
    tokenizer = base_model.open_tokenizer(directory)
    written = json.loads(tokenizer.backend_tokenizer.to_str())
    where = f"{directory}: tokenizer"
    if written["model"]["type"] != "BPE":
        raise unrepresentable_error(where, f"it is a {written['model']['type']}")
    if parts := [one for one in ("continuing_subword_prefix", "end_of_word_suffix") if written["model"].get(one)]:
        raise unrepresentable_error(where, f"it has a {parts[0]}")
    added = {one["id"]: one for one in written["added_tokens"]}
    strips = _strips_spaces(list(added.values()), where)
    opening = _SpecialTokenPlacement(tokenizer, where)
    if any(one["type"] == "ByteLevel" for one in sequence_steps(written["pre_tokenizer"], "pretokenizers")):
        cut = _read_byte_level(written, where)
    else:
        cut = read_byte_fallback(written, opening.starts_plain, where)
    tokens, types = _entries(written["model"]["vocab"], added, cut, size, where)
    special, notes = _special_token_ids(tokenizer, tokens, directory)
    return GgufVocabulary(
        cut.model, cut.pre, tokens, types, cut.merges, cut.scores_of(tokens, types), special, opening.add_bos,
        opening.add_eos, cut.space_prefix, _adapt_chat_template(tokenizer, cut.space_before_chat), strips,
        (*cut.notes, *opening.notes, *notes, *(_STRIP_NOTES if strips else ())),
    )  # fmt: skip


def _read_byte_level(written: Mapping[str, Any], where: str) -> GgufTokenizerModel:
    model, notes = written["model"], []
    rule = find_rule(written, where)
    normalizers = sequence_steps(written["normalizer"], "normalizers")
    if any(one["type"] != "NFC" for one in normalizers):
        raise unrepresentable_error(where, f"it changes texts first ({', '.join(one['type'] for one in normalizers)})")
    if normalizers:
        notes.append("llama.cpp does not compose characters (NFC) first: a text in decomposed form is cut otherwise")
    if rule.note:
        notes.append(rule.note)
    if missing := ALPHABET - model["vocab"].keys():
        raise unrepresentable_error(where, f"{len(missing)} of 256 bytes are no entries")
    merges = [" ".join(pair) for pair in parse_merges(model["merges"])]
    return GgufTokenizerModel("gpt2", rule.name, merges=merges, notes=tuple(notes))


def _strips_spaces(added: Sequence[Mapping[str, Any]], where: str) -> bool:
    """Whether special tokens swallow the spaces after them. llama.cpp has one such rule; any other is refused."""
    for one in added:
        if one["single_word"] or one["lstrip"]:
            raise unrepresentable_error(
                where, f"{one['content']} is found by {'lstrip' if one['lstrip'] else 'single_word'}"
            )
    stripping = {one["content"] for one in added if one["rstrip"]}
    everything = {one["content"] for one in added}
    if stripping and (stripping != everything - _NOT_STRIPPED or not everything >= {*_NOT_STRIPPED, "</s>"}):
        raise unrepresentable_error(where, f"{min(stripping)} swallows the spaces after it (rstrip), others do not")
    return bool(stripping)


def _entries(
    vocabulary: Mapping[str, int],
    added: Mapping[int, Mapping[str, Any]],
    cut: GgufTokenizerModel,
    size: int,
    where: str,
) -> tuple[list[str], list[int]]:
    tokens = [f"[PAD{i}]" for i in range(size)]
    types = [int(TokenType.UNUSED)] * size
    highest = max([*vocabulary.values(), *added])
    if highest >= size:
        raise BaseModelError(
            f"{where}: token {highest} has no row in the embedding ({size}); the tokenizer is another model's"
        )
    for text, i in vocabulary.items():
        tokens[i], types[i] = text, int(cut.kind(text))
    for i, one in added.items():
        tokens[i] = cut.text_of(one)
        types[i] = int(TokenType.CONTROL if one["special"] else TokenType.USER_DEFINED)
    if cut.unknown is not None and cut.unknown in tokens:
        types[tokens.index(cut.unknown)] = int(TokenType.UNKNOWN)
    if len(set(tokens)) < size:
        twice = next(text for i, text in enumerate(tokens) if text in tokens[:i])
        raise unrepresentable_error(where, f"two of its entries are {twice!r}")
    return tokens, types


class _SpecialTokenPlacement:
    """What stands before and after a text, and how a conversation begins."""

    def __init__(self, tokenizer: Any, where: str) -> None:
        plain: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
        whole: list[int] = tokenizer("a")["input_ids"]
        at = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), None)
        if at is None:
            raise unrepresentable_error(where, "tokens around a text change how it is cut")
        before, after = whole[:at], whole[at + len(plain) :]
        self.notes: tuple[str, ...] = ()
        chat = _render_conversation(tokenizer, where)
        self.starts_plain: bool | None = None if chat is None else not _starts_special(tokenizer, chat)
        """With a word that a space may be put before; None: there is no chat template."""
        self.add_bos = before == [tokenizer.bos_token_id]
        self.add_eos = after == [tokenizer.eos_token_id] and chat is None
        if before and not self.add_bos:
            self.notes += (f"{len(before)} tokens that transformers puts before a text are left out by llama.cpp",)
        if self.add_bos and chat is not None and not chat.startswith(tokenizer.bos_token):
            # llama.cpp's server tokenises a conversation like any text: it would add what training never saw
            self.add_bos = False
            self.notes += (f"{tokenizer.bos_token} is put before no text: the chat template begins without it",)


def _render_conversation(tokenizer: Any, where: str) -> str | None:
    """A short conversation; None without a chat template."""
    if not tokenizer.chat_template:
        return None
    try:
        text: str = tokenizer.apply_chat_template(
            [{"role": "user", "content": "a"}], tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # a template is a program: it can fail in any way
        raise BaseModelError(f"{where}: its chat template fails for a plain question: {error}") from None
    return text


def _starts_special(tokenizer: Any, text: str) -> bool:
    """Or with a space, before which none is put either."""
    return text.startswith((" ", *(one.content for one in tokenizer.added_tokens_decoder.values())))


def _special_token_ids(
    tokenizer: Any, tokens: Sequence[str], directory: Path
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Ids by their part; llama.cpp knows three ends, and those whose names look like ends."""
    ids = {part: getattr(tokenizer, f"{part}_token_id") for part in ("bos", "eos", "unk", "pad")}
    found = {part: int(i) for part, i in ids.items() if i is not None and i < len(tokens)}
    ends = _read_end_token_ids(directory)
    if "eos" not in found:
        if not ends:
            raise BaseModelError(f"{directory}: neither the tokenizer nor generation_config.json says what ends a text")
        found["eos"] = ends[0]
    found.setdefault("bos", found["eos"])  # llama.cpp would take token 11 for it
    unnamed = [i for i in ends if i != found["eos"] and tokens[i] not in ENDS]
    found |= dict(zip(("eot", "eom"), unnamed, strict=False))
    notes = []
    if lost := [tokens[i] for i in unnamed[2:]]:
        notes.append(f"llama.cpp does not end at {', '.join(lost)}")
    named = [text for i, text in enumerate(tokens) if text in ENDS and ends and i not in (*ends, found["eos"])]
    if named:
        notes.append(f"llama.cpp ends at {', '.join(named)}, too: it goes by the name")
    return found, tuple(notes)


def _read_end_token_ids(directory: Path) -> list[int]:
    file = directory / "generation_config.json"
    if not file.is_file():
        return []
    try:
        value = json.loads(file.read_bytes()).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise BaseModelError(f"{file}: not as transformers writes it ({error}); bring the original file") from None
    return [] if value is None else [value] if isinstance(value, int) else [int(one) for one in value]


def _adapt_chat_template(tokenizer: Any, space_first: bool) -> str | list[dict[str, str]] | None:
    found = tokenizer.chat_template
    if not found:
        return None
    named = found if isinstance(found, dict) else {"default": found}
    prefix = "{{ ' ' }}" if space_first else ""
    if tokenizer.bos_token is None:
        prefix = "{%- set bos_token = '' -%}" + prefix if any("bos_token" in one for one in named.values()) else prefix
    named = {name: prefix + text for name, text in named.items()}
    if set(named) == {"default"}:
        only: str = named["default"]
        return only
    return [{"name": name, "template": text} for name, text in named.items()]


def write_metadata(writer: GGUFWriter, vocabulary: GgufVocabulary) -> None:
    """Write it into a file's metadata."""
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    if vocabulary.scores is not None:
        writer.add_token_scores(vocabulary.scores)
    writer.add_token_types(vocabulary.types)
    if vocabulary.merges is not None:
        writer.add_token_merges(vocabulary.merges)
    for part, i in vocabulary.special.items():
        getattr(writer, f"add_{part}_token_id")(i)
    writer.add_add_bos_token(vocabulary.add_bos)
    writer.add_add_eos_token(vocabulary.add_eos)
    if vocabulary.space_prefix is not None:
        writer.add_add_space_prefix(vocabulary.space_prefix)
    if vocabulary.template is not None:
        writer.add_chat_template(vocabulary.template)
