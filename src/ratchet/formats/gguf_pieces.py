"""Tokenizers of the SentencePiece kind in GGUF: pieces of characters with scores, bytes for what is no piece.

transformers merges pairs by rank, llama.cpp whichever neighbours make the piece of the highest score (as SentencePiece
does, Kudo and Richardson 2018). Both do the same if every way to make a piece is among the merges, as it is when they
were derived from a SentencePiece model; the rank of a piece's first merge is then its score.

The space before a text: llama.cpp puts one before everything that follows a special token (`add_space_prefix`), or
nowhere. transformers also knows `first`: only before a text that begins without one. Conversations that begin with a
special token are then right with nowhere; for those that begin with words the chat template says the space itself.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gguf import TokenType

from ratchet.formats.gguf_pretokenizers import pairs, unrepresentable

SPACE = "▁"
BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_UNRANKED = -1000.0
"""Of entries that no merge makes; only single characters, bytes and added tokens are among them."""


def _alphabet() -> frozenset[str]:
    """The characters that stand for bytes in a byte-level vocabulary (Radford et al. 2019)."""
    from tokenizers import pre_tokenizers

    return frozenset(pre_tokenizers.ByteLevel.alphabet())


ALPHABET = _alphabet()


@dataclass(frozen=True)
class Cut:
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


def steps(part: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    """Parts of a sequence, in order; one that is none is its only part."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [step for one in part[key] for step in steps(one, key)]
    return [part]


def of(written: Mapping[str, Any], starts_plain: bool | None, where: str) -> Cut:
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
        raise unrepresentable(where, f"<0x{missing[0]:02X}> is no entry, so not every text can be written in bytes")
    prefix, replaces = _spaces(written, where)
    notes: tuple[str, ...] = ()
    if prefix == "always":
        notes = ("llama.cpp puts a space before a text that begins with a space, too; transformers does not",)
    if prefix == "first":
        where_not = "before none" if starts_plain is not None else "after special tokens, too"
        notes = (f"transformers puts a space before a text that begins without special token, llama.cpp {where_not}",)
    if replaces and any(one["normalized"] and SPACE in one["content"] for one in written["added_tokens"]):
        notes += (f"a {SPACE} that stands in a text counts as a space for transformers, and as a letter for llama.cpp",)
    merges = pairs(model["merges"])
    added = {one["content"] for one in written["added_tokens"]}
    _require_all_ways(model["vocab"].keys() - added, merges, where)
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    return Cut(
        "llama", "default", ranks=ranks, unknown=model.get("unk_token"), notes=notes, unescaped=replaces,
        space_prefix=prefix in ("all", "always") or (prefix == "first" and starts_plain is None),
        space_before_chat=prefix == "first" and starts_plain is True,
    )  # fmt: skip


def _spaces(written: Mapping[str, Any], where: str) -> tuple[str, bool]:
    """Where a space is put first: nowhere, all (fragments), always (but before a space), first; and who writes ▁."""
    normal = [_normal(one) for one in steps(written["normalizer"], "normalizers")]
    cuts = steps(written["pre_tokenizer"], "pretokenizers")
    replace = f"Replace ' ' {SPACE}"
    if normal in ([replace], [f"Prepend {SPACE}", replace]):
        idle = all(one["type"] == "Split" and one["pattern"] == {"String": " "} for one in cuts)  # no space is left
        if not idle:
            raise unrepresentable(where, f"its pre-tokenizer has {cuts[0]['type']}")
        if len(normal) == 2 and (found := [one["content"] for one in written["added_tokens"] if one["normalized"]]):
            raise unrepresentable(where, f"{found[0]} is found only where a space would be put before it (normalized)")
        return ("all" if len(normal) == 2 else "nowhere"), True
    if not normal and len(cuts) == 1 and cuts[0]["type"] == "Metaspace":
        if cuts[0]["replacement"] != SPACE or cuts[0].get("split", True):
            raise unrepresentable(where, "it divides texts at spaces before it merges (Metaspace, split)")
        scheme = str(cuts[0]["prepend_scheme"])
        return {"never": "nowhere"}.get(scheme, scheme), False
    shown = ", ".join([*normal, *(one["type"] for one in cuts)]) or "nothing"
    raise unrepresentable(where, f"what it does with spaces ({shown})")


def _normal(step: Mapping[str, Any]) -> str:
    if step["type"] == "Prepend":
        return f"Prepend {step['prepend']}"
    if step["type"] == "Replace" and "String" in step["pattern"]:
        return f"Replace {step['pattern']['String']!r} {step['content']}"
    return str(step["type"])


def _require_all_ways(pieces: set[str], merges: Sequence[tuple[str, str]], where: str) -> None:
    """llama.cpp joins any two neighbours that make a piece: each such pair must be a merge, too."""
    known = set(merges)
    for piece in pieces:
        if BYTE.fullmatch(piece):
            continue
        for i in range(1, len(piece)):
            pair = (piece[:i], piece[i:])
            if pair not in known and pair[0] in pieces and pair[1] in pieces:
                raise unrepresentable(where, f"{pair[0]!r} and {pair[1]!r} are never merged to {piece!r}")
