"""The tokenizer of a GGUF file: entries, their kinds, merges or scores, and when a text gets which token before it.

Read from the tokenizer as transformers opens it, never from its files: transformers builds the pre-tokenizer of some
classes anew, whatever tokenizer.json says, and that is what the model was trained with. Everything that llama.cpp
would do otherwise is refused, or noted where it concerns few texts. What llama.cpp does is in `src/llama-vocab.cpp`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, TokenType

from ratchet.errors import BaseModelError
from ratchet.formats import gguf_pieces, gguf_pretokenizers
from ratchet.formats.gguf_pretokenizers import unrepresentable
from ratchet.model import source

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
class Vocabulary:
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


def of(directory: Path, size: int) -> Vocabulary:
    """The tokenizer of a model's directory.

    Args:
        directory: with the tokenizer's files; generation_config.json is read where there is one.
        size: rows of the embedding; entries that the tokenizer does not have are filled in.

    Raises:
        BaseModelError: it cannot be read, or llama.cpp cannot do what it does.
    """
    tokenizer = source.open_tokenizer(directory)
    written = json.loads(tokenizer.backend_tokenizer.to_str())
    where = f"{directory}: tokenizer"
    if written["model"]["type"] != "BPE":
        raise unrepresentable(where, f"it is a {written['model']['type']}")
    if parts := [one for one in ("continuing_subword_prefix", "end_of_word_suffix") if written["model"].get(one)]:
        raise unrepresentable(where, f"it has a {parts[0]}")
    added = {one["id"]: one for one in written["added_tokens"]}
    strips = _strips(list(added.values()), where)
    opening = _Opening(tokenizer, where)
    if any(one["type"] == "ByteLevel" for one in gguf_pieces.steps(written["pre_tokenizer"], "pretokenizers")):
        cut = _byte_level(written, where)
    else:
        cut = gguf_pieces.of(written, opening.starts_plain, where)
    tokens, types = _entries(written["model"]["vocab"], added, cut, size, where)
    special, notes = _special(tokenizer, tokens, directory)
    return Vocabulary(
        cut.model, cut.pre, tokens, types, cut.merges, cut.scores_of(tokens, types), special, opening.add_bos,
        opening.add_eos, cut.space_prefix, _template(tokenizer, cut.space_before_chat), strips,
        (*cut.notes, *opening.notes, *notes, *(_STRIP_NOTES if strips else ())),
    )  # fmt: skip


def _byte_level(written: Mapping[str, Any], where: str) -> gguf_pieces.Cut:
    model, notes = written["model"], []
    rule = gguf_pretokenizers.find(written, where)
    normalizers = gguf_pieces.steps(written["normalizer"], "normalizers")
    if any(one["type"] != "NFC" for one in normalizers):
        raise unrepresentable(where, f"it changes texts first ({', '.join(one['type'] for one in normalizers)})")
    if normalizers:
        notes.append("llama.cpp does not compose characters (NFC) first: a text in decomposed form is cut otherwise")
    if rule.note:
        notes.append(rule.note)
    if missing := gguf_pieces.ALPHABET - model["vocab"].keys():
        raise unrepresentable(where, f"{len(missing)} of 256 bytes are no entries")
    merges = [" ".join(pair) for pair in gguf_pretokenizers.pairs(model["merges"])]
    return gguf_pieces.Cut("gpt2", rule.name, merges=merges, notes=tuple(notes))


def _strips(added: Sequence[Mapping[str, Any]], where: str) -> bool:
    """Whether special tokens swallow the spaces after them. llama.cpp has one such rule; any other is refused."""
    for one in added:
        if one["single_word"] or one["lstrip"]:
            raise unrepresentable(where, f"{one['content']} is found by {'lstrip' if one['lstrip'] else 'single_word'}")
    stripping = {one["content"] for one in added if one["rstrip"]}
    everything = {one["content"] for one in added}
    if stripping and (stripping != everything - _NOT_STRIPPED or not everything >= {*_NOT_STRIPPED, "</s>"}):
        raise unrepresentable(where, f"{min(stripping)} swallows the spaces after it (rstrip), others do not")
    return bool(stripping)


def _entries(
    vocabulary: Mapping[str, int], added: Mapping[int, Mapping[str, Any]], cut: gguf_pieces.Cut, size: int, where: str
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
        raise unrepresentable(where, f"two of its entries are {twice!r}")
    return tokens, types


class _Opening:
    """What stands before and after a text, and how a conversation begins."""

    def __init__(self, tokenizer: Any, where: str) -> None:
        plain: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
        whole: list[int] = tokenizer("a")["input_ids"]
        at = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), None)
        if at is None:
            raise unrepresentable(where, "tokens around a text change how it is cut")
        before, after = whole[:at], whole[at + len(plain) :]
        self.notes: tuple[str, ...] = ()
        chat = _rendered(tokenizer, where)
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


def _rendered(tokenizer: Any, where: str) -> str | None:
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


def _special(tokenizer: Any, tokens: Sequence[str], directory: Path) -> tuple[dict[str, int], tuple[str, ...]]:
    """Ids by their part; llama.cpp knows three ends, and those whose names look like ends."""
    ids = {part: getattr(tokenizer, f"{part}_token_id") for part in ("bos", "eos", "unk", "pad")}
    found = {part: int(i) for part, i in ids.items() if i is not None and i < len(tokens)}
    ends = _ends(directory)
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


def _ends(directory: Path) -> list[int]:
    file = directory / "generation_config.json"
    if not file.is_file():
        return []
    try:
        value = json.loads(file.read_bytes()).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise BaseModelError(f"{file}: not as transformers writes it ({error}); bring the original file") from None
    return [] if value is None else [value] if isinstance(value, int) else [int(one) for one in value]


def _template(tokenizer: Any, space_first: bool) -> str | list[dict[str, str]] | None:
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


def declare(writer: GGUFWriter, vocabulary: Vocabulary) -> None:
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
