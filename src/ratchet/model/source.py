"""Where a base model comes from: a directory, the hub, or our own tiny one. Everything is pinned by content."""

import json
import math
from datetime import datetime
from pathlib import Path
from typing import Any

from ratchet import digest
from ratchet.config import Base
from ratchet.errors import BaseModelError
from ratchet.layout import Layout
from ratchet.records import BaseCard

TINY = "tiny"

_PATTERNS = (
    "config.json", "generation_config.json", "*.safetensors", "model.safetensors.index.json",
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "README.md",
)  # fmt: skip
"""The files of a base model; others (other formats, pictures) are neither fetched nor part of its digest."""

_WEIGHTLESS = ("README.md",)
"""Fetched for the licence, but no part of the model's identity."""


def fetch(layout: Layout, settings: Base) -> tuple[Path, str | None]:
    """Directory and commit of the model that params.yaml names; downloads a hub id. Not for `tiny`.

    Raises:
        BaseModelError: it is neither a directory nor to be had from the hub.
    """
    directory = (layout.root / Path(settings.source).expanduser()).resolve()
    if directory.is_dir():
        return directory, None
    looks_local = settings.source.startswith((".", "/", "~")) or settings.source.count("/") != 1
    if looks_local:
        raise BaseModelError(f"base.source: {settings.source}: no such directory ({directory})")
    if settings.revision is None:
        raise BaseModelError(
            f"base.source: {settings.source} is taken for a hub id (no such directory: {directory}): "
            "pin it with base.revision (a commit, or `main`: the commit that it is now is recorded)"
        )
    path = _download(settings.source, settings.revision, local_only=False)
    return path, path.name  # the hub's cache names a snapshot's directory after its commit


def _download(repository: str, revision: str, local_only: bool) -> Path:
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            repository, revision=revision, allow_patterns=list(_PATTERNS), local_files_only=local_only
        )
    except Exception as error:  # the library raises a dozen unrelated types for network, name and permission
        if not local_only and _cached(repository, revision):
            return _download(repository, revision, local_only=True)
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BaseModelError(
            f"base.source: {repository} at {revision} cannot be had from the hub ({cause}); check name, revision, "
            "network and HF_TOKEN, or give a local directory"
        ) from None
    return Path(found)


def _cached(repository: str, revision: str) -> bool:
    try:
        _download(repository, revision, local_only=True)
    except BaseModelError:
        return False
    return True


def locate(layout: Layout, card: BaseCard) -> Path:
    """Directory of the pinned base model. Raises BaseModelError when it is gone; `check` compares its bytes."""
    if card.source == TINY:
        path = layout.tiny_model
    elif card.revision is not None:
        return _download(card.source, card.revision, local_only=_cached(card.source, card.revision))
    else:
        path = (layout.root / Path(card.source).expanduser()).resolve()
    if not path.is_dir():
        raise BaseModelError(f"{path}: the base model is gone; run stage base again (`dvc repro base`)")
    return path


def fingerprint(path: Path) -> dict[str, str]:
    """SHA-256 of every file that makes up the model.

    Raises:
        BaseModelError: config, weights (every shard) or tokenizer are missing.
    """
    names = sorted({p.name for pattern in _PATTERNS for p in path.glob(pattern)} - set(_WEIGHTLESS))
    if "config.json" not in names:
        raise BaseModelError(f"{path}: no config.json; this is no model directory")
    if not any(name.endswith(".safetensors") for name in names):
        other = sorted(p.name for p in path.glob("*.bin"))
        hint = f" ({other[0]} is a pickle: convert it to safetensors)" if other else ""
        raise BaseModelError(f"{path}: no weights (*.safetensors){hint}")
    _check_shards(path, names)
    if not {"tokenizer.json", "tokenizer.model", "vocab.json"} & set(names):
        raise BaseModelError(f"{path}: no tokenizer (tokenizer.json); copy the one of the model there")
    return {name: digest.of_file(path / name) for name in names}


def _check_shards(path: Path, names: list[str]) -> None:
    index = path / "model.safetensors.index.json"
    if index.exists():
        shards = set(json.loads(index.read_text())["weight_map"].values())
        if missing := sorted(shards - set(names)):
            raise BaseModelError(f"{path}: {len(missing)} of {len(shards)} shards missing, first {missing[0]}")


def check(path: Path, expected: dict[str, str]) -> None:
    """Compare the bytes at hand with the pinned ones. Raises BaseModelError naming the first file that differs."""
    found = fingerprint(path)
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            state = "missing" if name not in found else "new" if name not in expected else "changed"
            raise BaseModelError(f"{path / name}: {state} since the base was pinned; run `dvc repro base`")


def architecture(path: Path) -> str:
    """Name of the model's class, from its config. Raises BaseModelError when config.json is none."""
    try:
        config = json.loads((path / "config.json").read_bytes())
        return str((config.get("architectures") or [config["model_type"]])[0])
    except (ValueError, AttributeError, KeyError, TypeError, IndexError):
        raise BaseModelError(f"{path / 'config.json'}: not the config of a model; bring the original file") from None


def count_parameters(path: Path) -> int:
    """Weights stored in the safetensors files, from their headers alone. Raises BaseModelError for a damaged file."""
    from safetensors import SafetensorError, safe_open

    total = 0
    for shard in sorted(path.glob("*.safetensors")):
        try:
            with safe_open(str(shard), framework="np") as tensors:
                shapes = [tensors.get_slice(name).get_shape() for name in tensors.keys()]  # noqa: SIM118 (not a dict)
        except SafetensorError as error:
            raise BaseModelError(f"{shard}: damaged or cut short ({error}); bring the original file") from None
        total += sum(math.prod(shape) for shape in shapes)
    return total


TEMPLATE_DATE = datetime(2024, 7, 26)
"""What `strftime_now` says in chat templates: Llama 3.1's own falls back to it. Data must not depend on the day."""


def load_tokenizer(path: Path, template: Path | None = None) -> Any:
    """The tokenizer of a model directory, ready for batches; with `template`, that file is its chat template.

    Raises:
        BaseModelError: it cannot be read, is not a fast one, or has no end-of-turn token; the chat template is missing
            or no Jinja.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # anything from a JSON error to a missing sentencepiece
        raise BaseModelError(f"{path}: the tokenizer cannot be loaded ({str(error).splitlines()[0]})") from None
    if not tokenizer.is_fast:
        raise BaseModelError(
            f"{path}: the tokenizer has no fast version (tokenizer.json), so it cannot say which token is which text; "
            "bring the tokenizer.json of the model"
        )
    if template is not None:
        tokenizer.chat_template = _template_text(template)
    if not tokenizer.chat_template:
        raise BaseModelError(
            f"{path}: the tokenizer has no chat template; use the -Instruct variant of the model, or put a "
            "chat_template.jinja beside its tokenizer"
        )
    named = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {"": tokenizer.chat_template}
    for text in named.values():
        _compile_with_fixed_date(text, template or path)
    if tokenizer.eos_token_id is None:
        raise BaseModelError(f"{path}: the tokenizer has no eos_token, so an answer could never end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # padding is masked everywhere, so its value does not matter
    return tokenizer


def _template_text(template: Path) -> str:
    try:
        text = template.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise BaseModelError(f"{template}: the chat template cannot be read ({error})") from None
    if not text.strip():
        raise BaseModelError(f"{template}: the chat template is empty")
    return text


def _compile_with_fixed_date(text: str, where: Path) -> None:
    """Compile a chat template into transformers' cache, from which every rendering takes it, with a fixed date."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        compiled = _compile_jinja_template(text)
    except Exception as error:  # Jinja's errors; the line is in an attribute
        line = getattr(error, "lineno", None)
        raise BaseModelError(f"{where}{f':{line}' if line else ''}: the chat template is no Jinja ({error})") from None
    compiled.globals["strftime_now"] = TEMPLATE_DATE.strftime
