"""Finds rows whose text has a flaw: another language, spam, garbled text, an answer that looks cut off, a low score.

The thresholds are those of published filters of training data. They were made for web pages, so a row that fails is
reported on the dataset card, and dropped only if prepare.quality.drop names the check. Sources:

    Gopher      Rae et al. 2021, Scaling Language Models, table A1 and section A.1.1
    C4          Raffel et al. 2020, Exploring the Limits of Transfer Learning, section 2.2
    Whisper     Radford et al. 2023, Robust Speech Recognition, section 4.5
    CCNet       Wenzek et al. 2020, CCNet, section 3
"""

import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from ratchet.config.extras import require_libraries
from ratchet.config.prepare import Prepare, QualityCheck
from ratchet.data.conversation import SourceRow, extract_text
from ratchet.data.schema_detection import FieldNames
from ratchet.errors import DataError, SettingsError

MIN_LANGUAGE_PROBABILITY = 0.5
"""Minimum probability of a language that prepare.languages does not name (CCNet's threshold)."""
MIN_LANGUAGE_LETTERS = 20
"""Number of letters below which no language is detected: `Danke` is as likely to be Danish as German."""
MIN_WORDS = 200
"""Number of words from which Gopher's rules apply. There it is 50, from where they flag 5.9 % of GSM8K's answers."""
MAX_WORDS = 5000
"""Number of words of a text that are examined for spam, so that a whole book does not take seconds."""
MAX_DUPLICATE_LINES = 0.3
"""Maximum share of lines that occurred before in the text (Gopher)."""
MAX_TOP_NGRAM = {2: 0.2, 3: 0.18, 4: 0.16}
"""Maximum share of characters in the most frequent n-gram, by n (Gopher)."""
MAX_DUPLICATE_NGRAMS = {5: 0.15, 10: 0.1}
"""Maximum share of characters in n-grams that occurred before, by n (the ends of Gopher's range)."""
MAX_SYMBOLS_PER_WORD = 0.1
"""Maximum number of hash signs, or of ellipses, per word (Gopher)."""
MAX_COMPRESSION_RATIO = 2.4
"""Maximum ratio of bytes to compressed bytes of a text of fewer than MIN_WORDS words (Whisper's test for loops)."""
PLACEHOLDER = "lorem ipsum"
"""Text of pages without content (C4)."""
DETAIL_CHARACTERS = 60

_CONTROL_CHARACTERS = re.compile("[\x01-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f]")
_NOT_ASCII = re.compile("[\x80-\uffff]{2,}")
_LIST_ITEM = re.compile(r"\s*(?:[-*+•|>#]|\w{1,3}[.)]\s|```)")
_SENTENCE_END = re.compile(r"\w{3}[.!?…][\"'”’»)\]]*\s|[。！？؟۔।]")  # noqa: RUF001 (they are meant)
_OPEN_ENDINGS = ",;([{-–—/"  # noqa: RUF001


class QualityChecks:
    """The checks that the settings enable. Call `find_flaws` for each row."""

    def __init__(self, settings: Prepare) -> None:
        """Load the language detector, if prepare.languages is set.

        Raises:
            MissingLibraryError: the detector is not installed.
            SettingsError: the detector does not know one of the languages.
        """
        self._settings = settings
        self._fields, self._field_seen = FieldNames(), False
        self._identifier = _load_identifier(settings.languages) if settings.languages else None

    def find_flaws(self, row: SourceRow) -> Iterator[tuple[QualityCheck, str]]:
        """Yield each check that the row fails, with an explanation."""
        conversation = row.conversation
        rejected = [] if conversation.rejected is None else [conversation.rejected]
        messages = [*conversation.messages, *rejected]
        answers = [extract_text(message) for message in messages if message["role"] == "assistant"]
        texts = [extract_text(message) for message in messages]
        last = [conversation.response, *map(extract_text, rejected)]
        if problem := next(filter(None, map(find_garbled_text, texts)), None):
            yield "garbled", problem
        if problem := next(filter(None, map(find_spam, answers)), None):
            yield "spam", problem
        if problem := next(filter(None, map(find_cut_off, last)), None):
            yield "cut_off", problem
        if self._settings.quality.field and (problem := self._find_low_score(row)):
            yield "low_score", problem
        if self._identifier and (problem := self._find_other_language(row.conversation.text)):
            yield "language", problem

    def check(self) -> None:
        """Raise DataError if no record has the field of the score."""
        field = self._settings.quality.field
        if field and not self._field_seen and self._fields.names:
            raise DataError(f"params.yaml: prepare.quality.field: {self._fields.describe_missing(field)}")

    def _find_low_score(self, row: SourceRow) -> str | None:
        field, minimum = str(self._settings.quality.field), self._settings.quality.minimum
        self._fields.add(row.fields)
        self._field_seen |= field in row.fields
        value = row.fields.get(field)
        try:
            score = None if isinstance(value, bool) else float(value)  # type: ignore[arg-type]  # caught below
        except (TypeError, ValueError, OverflowError):
            score = None
        if score is None:
            return f"{field} is {str(value)[:DETAIL_CHARACTERS]!r}, expected a number"
        return None if minimum is not None and score >= minimum else f"{field} is {score:g}, below {minimum:g}"

    def _find_other_language(self, text: str) -> str | None:
        if sum(map(str.isalpha, text)) < MIN_LANGUAGE_LETTERS or self._identifier is None:
            return None
        language, probability = self._identifier.classify(text)
        if language in self._settings.languages or probability < MIN_LANGUAGE_PROBABILITY:
            return None
        return f"{language} with probability {probability:.2f}: {_shorten(text)}"


def _load_identifier(languages: Sequence[str]) -> Any:
    require_libraries("prepare.languages", "language")
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    if unknown := [language for language in languages if language not in identifier.labels]:
        raise SettingsError(
            f"params.yaml: prepare.languages: found {', '.join(unknown)}; expected codes that the detector knows: "
            f"{', '.join(sorted(identifier.labels))}"
        )
    return identifier


# ----- Garbled text


def find_garbled_text(text: str) -> str | None:
    """Return the damage of a text: replacement characters, control characters, or text decoded as another encoding."""
    if match := _CONTROL_CHARACTERS.search(text):
        return f"control character U+{ord(match[0]):04X} in {_shorten(text, match.start())}"
    if text.isascii():
        return None
    if (position := text.find("\ufffd")) >= 0:
        return f"U+FFFD in place of a character in {_shorten(text, position)}"
    for match in _NOT_ASCII.finditer(text):
        if repaired := _decode_again(match[0]):
            return f"wrong encoding: {_shorten(text, match.start())}, where {match[0]!r} is probably {repaired!r}"
    return None


def _decode_again(characters: str) -> str | None:
    """Return the characters that UTF-8 bytes stand for, if these were decoded as Windows-1252 or Latin-1.

    Hardly any other text gives bytes that are valid UTF-8, except a capital letter before a closing guillemet.
    """
    if len(characters) == 2 and characters[1] == "»":
        return None
    try:
        return b"".join(_encode_character(character) for character in characters).decode()
    except UnicodeError:
        return None


def _encode_character(character: str) -> bytes:
    try:
        return character.encode("cp1252")
    except UnicodeEncodeError:  # five bytes have no character in Windows-1252
        return character.encode("latin-1")


# ----- Spam


def find_spam(text: str) -> str | None:
    """Return why a text looks like spam: repetition, symbols, or a placeholder."""
    if PLACEHOLDER in text.casefold():
        return f"placeholder text: {_shorten(text, text.casefold().find(PLACEHOLDER))}"
    words = text.split(maxsplit=MAX_WORDS)[:MAX_WORDS]
    if len(words) < MIN_WORDS:
        data = text.encode()
        ratio = len(data) / len(zlib.compress(data))
        return f"repetition: compressed {ratio:.1f} times: {_shorten(text)}" if ratio > MAX_COMPRESSION_RATIO else None
    for name, count in (("hash signs", text.count("#")), ("ellipses", text.count("...") + text.count("…"))):
        if count > MAX_SYMBOLS_PER_WORD * len(words):
            return f"symbols: {count:,} {name} in {len(words):,} words: {_shorten(text)}"
    lines = [line for line in map(str.strip, text.splitlines()) if line]
    duplicates = 1 - len(set(lines)) / len(lines)
    if duplicates > MAX_DUPLICATE_LINES:
        return f"repetition: {duplicates:.0%} of the lines occurred before: {_shorten(text)}"
    return _find_repeated_ngrams(text, words)


def _find_repeated_ngrams(text: str, words: Sequence[str]) -> str | None:
    characters = sum(map(len, words))
    for n, limit in MAX_TOP_NGRAM.items():
        ngram, count = Counter(zip(*(words[start:] for start in range(n)), strict=False)).most_common(1)[0]
        if count > 1 and (share := count * sum(map(len, ngram)) / characters) > limit:
            return f"repetition: {share:.0%} of the text is {' '.join(ngram)[:DETAIL_CHARACTERS]!r}"
    for n, limit in MAX_DUPLICATE_NGRAMS.items():
        if (share := _count_repeated_characters(words, n) / characters) > limit:
            return f"repetition: {share:.0%} of the text occurred before, in runs of {n} words: {_shorten(text)}"
    return None


def _count_repeated_characters(words: Sequence[str], n: int) -> int:
    """Count the characters of n-grams that occurred before; each word counts once."""
    seen, repeated, position = set(), 0, 0
    while position <= len(words) - n:
        ngram = tuple(words[position : position + n])
        if ngram in seen:
            repeated += sum(map(len, ngram))
            position += n
        else:
            seen.add(ngram)
            position += 1
    return repeated


# ----- Answers that look cut off


def find_cut_off(answer: str) -> str | None:
    """Return why an answer looks cut off: an open code block, or prose that ends inside a sentence.

    C4 requires a punctuation mark at the end of each line. Here this holds only for the last line, and only if an
    earlier sentence of the line ends with a mark, because labels, lists, code and numbers have none.
    """
    if _has_open_block(answer):
        return f"a code block is not closed: {_shorten(answer[-DETAIL_CHARACTERS:])}"
    last = answer.rstrip().rpartition("\n")[2]
    if not last or not (last[-1].isalpha() or last[-1] in _OPEN_ENDINGS) or _LIST_ITEM.match(last):
        return None
    if _SENTENCE_END.search(last):
        return f"the last sentence has no end: {_shorten(last[-DETAIL_CHARACTERS:])}"
    return None


def _has_open_block(answer: str) -> bool:
    return bool(sum(line.lstrip().startswith("```") for line in answer.splitlines()) % 2)


def _shorten(text: str, position: int = 0) -> str:
    """Quote the text around a position, in one line."""
    start = max(0, position - DETAIL_CHARACTERS // 3)
    return repr(" ".join(text[start : start + DETAIL_CHARACTERS].split()))
