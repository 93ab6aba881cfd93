"""How a byte-level tokenizer divides a text before it merges, and llama.cpp's name for it.

GGUF holds no rule, only a name (`tokenizer.ggml.pre`) for rules that are built into llama.cpp (`src/llama-vocab.cpp`).
A wrong one goes unnoticed: most texts are cut into the same tokens. So the rules of tokenizer.json are written in one
form, a list of patterns that are applied one after another, and looked up among those that llama.cpp has; what is not
there cannot be carried.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ratchet.errors import BaseModelError

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
class Rule:
    """One of llama.cpp's."""

    name: str
    patterns: tuple[str, ...]
    whole_words: bool = False
    """A piece that is in the vocabulary is taken as it is, before any merge (`ignore_merges`)."""
    note: str | None = None


RULES = (
    Rule("gpt-2", (GPT2,)),
    Rule("smollm", (r"\p{N}", GPT2)),
    Rule("llama-bpe", (LLAMA3,), whole_words=True),
    Rule("smaug-bpe", (LLAMA3,)),
    Rule("qwen2", (QWEN2,)),
    Rule("qwen35", (QWEN35,)),
    Rule("deepseek-v3", DEEPSEEK3),
    Rule("deepseek-coder", DEEPSEEK_CODER),
    Rule("tekken", (TEKKEN,), whole_words=True, note=_CASE_NOTE),
    Rule("gpt-4o", (O200K,), note=_CASE_NOTE),
)


def find(written: Mapping[str, Any], where: str) -> Rule:
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
        raise unrepresentable(where, f"it divides texts by {shown if len(shown) <= 400 else shown[:400] + ' ...'}")
    whole_words = bool(written["model"].get("ignore_merges"))
    for rule in found:
        if rule.whole_words == whole_words:
            return rule
    if not _reaches_all(written):  # then it makes no difference
        raise unrepresentable(where, f"ignore_merges is {str(whole_words).lower()}, with the rule `{found[0].name}`")
    return found[0]


def unrepresentable(where: str, what: str) -> BaseModelError:
    """What to raise for a tokenizer that llama.cpp would imitate wrongly."""
    return BaseModelError(
        f"{where}: GGUF cannot represent this tokenizer: {what}, and llama.cpp has nothing that does the same; "
        "export no GGUF of it"
    )


def _patterns(pre_tokenizer: Mapping[str, Any] | None, where: str) -> tuple[str, ...]:
    steps = _steps(pre_tokenizer)
    if not steps or steps[-1]["type"] != "ByteLevel":
        raise unrepresentable(where, f"its pre-tokenizer ends with {steps[-1]['type'] if steps else 'nothing'}")
    found = [_pattern(step, where) for step in steps[:-1]]
    if steps[-1].get("add_prefix_space"):
        raise unrepresentable(where, "it puts a space before every text (add_prefix_space)")
    return (*found, GPT2) if steps[-1].get("use_regex", True) else tuple(found)


def _steps(pre_tokenizer: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    if pre_tokenizer is None:
        return []
    if pre_tokenizer["type"] == "Sequence":
        return [step for one in pre_tokenizer["pretokenizers"] for step in _steps(one)]
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
    raise unrepresentable(where, f"its pre-tokenizer has {_shown(step)}")


def _shown(step: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in step.items())


def pairs(merges: Sequence[str | Sequence[str]]) -> list[tuple[str, str]]:
    """Merges of tokenizer.json, which writes each as one text or as two."""
    divided = (one.split(" ", 1) if isinstance(one, str) else one for one in merges)
    return [(left, right) for left, right in divided]


def _reaches_all(written: Mapping[str, Any]) -> bool:
    """Whether merges make every entry that words can be, so that taking one whole changes nothing."""
    from tokenizers import models

    vocabulary = written["model"]["vocab"]
    bpe = models.BPE(dict(vocabulary), pairs(written["model"]["merges"]))
    words = vocabulary.keys() - {one["content"] for one in written["added_tokens"]}
    return all(len(bpe.tokenize(word)) == 1 for word in words)
