"""Locates and verifies base models (a directory, a hub id or the built-in tiny model) and loads tokenizers.

Every base model is pinned by its content: the SHA-256 of each file. This module does not import torch.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, cast, get_args

from ratchet.config.base import Base
from ratchet.config.train import Train
from ratchet.errors import BaseModelError, DamagedFileError, HubError, SettingsError
from ratchet.models import hub
from ratchet.storage import digests
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.progress import count_bytes
from ratchet.storage.records.base import BaseCard, StoredQuantization

TINY = "tiny"

BASE_DIGEST = "ratchet.base_digest"
"""Key of the base's digest in the metadata of an adapter's weights."""

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = "pytorch_model*.bin"
PICKLE_INDEX = "pytorch_model.bin.index.json"

FourBitType = Literal["nf4", "fp4"]

DATE_FUNCTION = "strftime_now"
"""Function of chat templates that writes the current date."""
TEMPLATE_DATE = datetime(2024, 7, 26)
"""Result of `strftime_now` in chat templates (Llama 3.1's own default): data must not depend on the current date."""

CONTEXT_LENGTH_NAMES = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length",
)  # fmt: skip
"""Names under which configs store the maximum number of tokens of a text."""

_PATTERNS = (
    "config.json", "generation_config.json", INDEX,
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "README.md",
)  # fmt: skip
"""Names of the files of a base model besides its weights. Other files (other formats, images) are neither downloaded
nor hashed."""

_CODE = "*.py"
"""Pattern of code files, which are downloaded and hashed only if base.trust_remote_code is set."""

_UNHASHED = ("README.md",)
"""Files that are downloaded for the licence, but are not part of the model's identity."""


# The pinned base of a project.


def fetch(layout: ProjectLayout, settings: Base) -> tuple[Path, str | None]:
    """Return directory and commit of the model that params.yaml names; download a hub id. Do not call it for `tiny`.

    Raises BaseModelError if the source is neither a directory nor available from the hub.
    """
    directory = (layout.root / Path(settings.source).expanduser()).resolve()
    if directory.is_dir():
        return directory, None
    if settings.source.startswith((".", "/", "~")) or settings.source.count("/") != 1:
        raise BaseModelError(f"base.source: {settings.source}: no such directory ({directory})")
    if settings.revision is None:
        raise BaseModelError(
            f"base.source: {settings.source} is not a directory ({directory}), so it is treated as a hub id, which "
            "needs base.revision: set a commit, or `main` to record its current commit"
        )
    patterns = _download_patterns(settings.trust_remote_code is not None)
    path = _download(settings.source, settings.revision, patterns)
    if settings.convert_pickles and not list_weight_files(path):
        path = _download(settings.source, settings.revision, [*patterns, PICKLES, PICKLE_INDEX])
    return path, path.name  # the hub's cache names a snapshot's directory after its commit


def _download(repository: str, revision: str, patterns: Sequence[str]) -> Path:
    try:
        return hub.download(repository, revision, patterns)
    except HubError as error:
        raise BaseModelError(f"base.source: {error}, or set a local directory") from None


def locate_before_stage(layout: ProjectLayout, settings: Base) -> tuple[Path, bool] | None:
    """Return the base's directory and whether its own code may run; None if they are unknown before stage base runs.

    Raises BaseModelError if the pinned directory is missing.
    """
    if layout.base_card.is_file() and (card := BaseCard.load(layout.base_card)).source == settings.source:
        return locate(layout, card), card.remote_code
    directory = (layout.root / Path(settings.source).expanduser()).resolve()
    if settings.source != TINY and directory.is_dir():
        return directory, settings.trust_remote_code is not None
    return None


def find_local(layout: ProjectLayout, card: BaseCard) -> Path | None:
    """Return the directory of the pinned base model, without checking its files; None if it is not on this machine."""
    path = _own_directory(layout, card)
    if path is None:
        return hub.find_cached(card.source, str(card.revision), _download_patterns(card.remote_code))
    return path if path.is_dir() else None


def locate(layout: ProjectLayout, card: BaseCard) -> Path:
    """Return the directory of the pinned base model, without checking its files (`verify_files` does).

    Raises BaseModelError if the directory is missing.
    """
    if (found := find_local(layout, card)) is not None:
        return found
    if (path := _own_directory(layout, card)) is None:
        return _download(card.source, str(card.revision), _download_patterns(card.remote_code))
    raise BaseModelError(f"{path}: the base model is missing; run `dvc repro base`")


def _own_directory(layout: ProjectLayout, card: BaseCard) -> Path | None:
    """Return the directory of a base that is not in the cache of the hub."""
    if card.source == TINY or card.converted:
        return layout.tiny_model
    return (layout.root / Path(card.source).expanduser()).resolve() if card.revision is None else None


@dataclass(frozen=True)
class BaseReference:
    """The base of a saved adapter."""

    digest: str
    name: str | None = None
    """Hub id, or directory relative to the project's; peft loads the base by it. None: unknown."""
    revision: str | None = None
    """Commit of the hub id."""


def refer_to(card: BaseCard) -> BaseReference:
    """Return the reference that adapters of this base contain. It names no directory of this machine, unless
    params.yaml does."""
    if card.revision is None and (card.source == TINY or card.converted):
        root = Path()
        return BaseReference(card.digest, ProjectLayout(root).tiny_model.relative_to(root).as_posix())
    return BaseReference(card.digest, card.source, card.revision)


def read_base_digest(adapter: Path) -> str:
    """Return the digest of the base on which an adapter was trained. For an adapter that peft itself saved, return the
    name of the base.

    Raises DamagedFileError if a file is missing or unreadable.
    """
    from safetensors import SafetensorError, safe_open

    path = adapter / "adapter_config.json"
    try:
        name = json.loads(path.read_bytes())["base_model_name_or_path"]  # earlier versions wrote the digest there
        path = adapter / "adapter_model.safetensors"
        with safe_open(str(path), framework="np") as tensors:
            return str((tensors.metadata() or {}).get(BASE_DIGEST, name))
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise DamagedFileError(f"{path}: cannot be read ({error}); train again") from None


def _download_patterns(include_code: bool) -> list[str]:
    return [*_PATTERNS, "*.safetensors", *([_CODE] if include_code else [])]


def fingerprint(path: Path, include_code: bool = False) -> dict[str, str]:
    """Return the SHA-256 of every file of the model. Raises BaseModelError like `list_model_files`."""
    names = list_model_files(path, include_code)
    with count_bytes("base model checked", sum((path / name).stat().st_size for name in names)) as add_bytes:
        return {name: digests.hash_file(path / name, add_bytes) for name in names}


def verify_files(path: Path, expected: dict[str, str]) -> None:
    """Compare the model's files with the pinned digests. Raises BaseModelError naming the first file that differs."""
    actual = fingerprint(path, include_code=any(name.endswith(".py") for name in expected))
    if difference := digests.find_first_difference(expected, actual):
        name, state = difference
        raise BaseModelError(f"{path / name}: {state} since the base was pinned; run `dvc repro base`")


# Files of a model directory.


def list_model_files(path: Path, include_code: bool = False) -> list[str]:
    """Return the sorted names of the files that make up the model.

    Raises BaseModelError if config, weights (any shard) or tokenizer are missing.
    """
    names = set(list_companion_files(path, include_code)) - set(_UNHASHED)
    if "config.json" not in names:
        raise BaseModelError(f"{path}: found no config.json; expected a model directory")
    weights = list_weight_files(path)
    if not weights:
        if pickles := sorted(match.name for match in path.glob(PICKLES)):
            hint = (
                f"; {pickles[0]} is a pickle: for the base, set base.convert_pickles: true to convert it without "
                "running its code; any other model must be saved as safetensors (`save_pretrained` of transformers)"
            )
        elif other_files := sorted(match.name for match in path.glob("*.safetensors")):
            hint = f" named {WEIGHTS} and no index; transformers does not read {other_files[0]}"
        else:
            hint = "; for a base that has only pickles (*.bin), set base.convert_pickles: true"
        raise BaseModelError(f"{path}: no weights (*.safetensors){hint}")
    if not {"tokenizer.json", "tokenizer.model", "vocab.json"} & names:
        raise BaseModelError(f"{path}: no tokenizer (tokenizer.json); copy the model's tokenizer to this directory")
    return sorted({*names, *weights})


def list_companion_files(path: Path, include_code: bool = False) -> list[str]:
    """Return the sorted names of all files of a model except weights, including the model card."""
    modules = path.rglob(_CODE) if include_code else ()
    matches = {match for pattern in _PATTERNS for match in path.glob(pattern)}
    return sorted(match.relative_to(path).as_posix() for match in matches.union(modules))


def list_weight_files(path: Path) -> list[str]:
    """Return the names of the safetensors files of the model; empty if there are none.

    Raises BaseModelError if a shard that the index names is missing, or the index is invalid.
    """
    index = path / INDEX
    if not index.exists():
        return [WEIGHTS] if (path / WEIGHTS).exists() else []
    return list_shards(index)


def list_shards(index: Path) -> list[str]:
    """Return the sorted names of the files that an index of weights names.

    Raises BaseModelError if a file is missing or outside the directory; or the index is invalid.
    """
    try:
        names = sorted({str(name) for name in json.loads(index.read_bytes())["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BaseModelError(f"{index}: not an index of weights ({error}); restore the original file") from None
    if outside := [name for name in names if Path(name).name != name]:
        raise BaseModelError(
            f"{index}: {outside[0]} is not a file in the directory of the index; restore the original file"
        )
    if missing := [name for name in names if not (index.parent / name).exists()]:
        raise BaseModelError(f"{index.parent}: {len(missing)} of {len(names)} shards missing, first {missing[0]}")
    return names


def read_tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every stored tensor by name, from headers only. Raises BaseModelError for a damaged file."""
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for name in list_weight_files(path):
        try:
            with safe_open(str(path / name), framework="np") as tensors:
                shapes |= {key: tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise BaseModelError(f"{path / name}: damaged or truncated ({error}); restore the original file") from None
    return shapes


# config.json.


def read_config(path: Path) -> dict[str, Any]:
    """Return the contents of config.json. Raises BaseModelError if it is not the config of a model."""
    file = path / "config.json"
    try:
        config = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise BaseModelError(f"{path}: found no config.json; expected a model directory") from None
    except ValueError as error:
        raise BaseModelError(f"{file}: not the config of a model ({error}); restore the original file") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise BaseModelError(f"{file}: not the config of a model (model_type is missing); restore the original file")
    return config


def find_context_length(config: Mapping[str, Any]) -> int | None:
    """Return the context length in tokens by config.json (its part for text, if it has one); None if it has none."""
    text_config = config.get("text_config")
    part = text_config if isinstance(text_config, dict) else config
    values = [part.get(name) for name in CONTEXT_LENGTH_NAMES]
    return min((value for value in values if isinstance(value, int) and value > 0), default=None)


def read_hidden_size(path: Path) -> int | None:
    """Return the hidden size of a model (of its text part) from config.json; None if the config has none.

    Raises BaseModelError like `read_config`.
    """
    config = read_config(path)
    text = config.get("text_config")
    width = (text if isinstance(text, dict) else config).get("hidden_size")
    return width if isinstance(width, int) else None


def require_pinned_code(path: Path) -> None:
    """Raise BaseModelError if the model's code is in another repository, where base.revision does not pin it."""
    for name in ("config.json", "tokenizer_config.json"):
        file = path / name
        try:
            auto_map = json.loads(file.read_bytes()).get("auto_map", {}) if file.is_file() else {}
            classes = [item for value in auto_map.values() for item in (value if isinstance(value, list) else [value])]
        except (ValueError, AttributeError) as error:
            raise BaseModelError(
                f"{file}: not in the format of transformers ({error}); restore the original file"
            ) from None
        if external := [item for item in classes if item and "--" in item]:
            raise BaseModelError(
                f"base.trust_remote_code: {file} takes its code from another repository ({external[0]}), which "
                "base.revision does not pin; copy that code to the model's directory and name it without `--`"
            )


def detect_stored_quantization(config: dict[str, Any], source: str) -> StoredQuantization | None:
    """Return how the weights of a config.json are quantized; None if they are not.

    Missing keys have the defaults of transformers' BitsAndBytesConfig. Raises BaseModelError if the weights are
    quantized by a method other than bitsandbytes' 4 bits. An adapter could be trained on some of these weights, but it
    could not be merged into the same weights.
    """
    stored = config.get("quantization_config")
    if not stored:  # some files contain null
        return None
    if not isinstance(stored, dict):
        raise BaseModelError(
            f"{source}: config.json: quantization_config: found {stored!r}, expected a mapping; restore the original "
            "file"
        )
    is_8bit, is_4bit = bool(stored.get("load_in_8bit")), bool(stored.get("load_in_4bit"))
    kind = stored.get("bnb_4bit_quant_type", "fp4")
    if not is_4bit or is_8bit or kind not in get_args(FourBitType):
        method = "bitsandbytes 8 bits" if is_8bit else str(stored.get("quant_method", "an unnamed method"))
        raise BaseModelError(
            f"base.source: the weights of {source} are already quantized ({method}); expected unquantized weights, or "
            "bitsandbytes NF4 or FP4: use the model from before it was quantized"
        )
    storage = str(stored.get("bnb_4bit_quant_storage", "uint8")).removeprefix("torch.")
    return StoredQuantization(
        kind=cast(FourBitType, kind), double=bool(stored.get("bnb_4bit_use_double_quant")), storage=storage
    )


def require_same_quantization(stored: StoredQuantization, settings: Train, source: str) -> None:
    """Raise SettingsError if the quantization in section train differs from that of the files.

    The files' quantization is used, because quantized weights are not quantized again.
    """
    expected = {
        "quantization": stored.kind,
        "double_quantization": stored.double,
        "quantization_storage": stored.storage,
    }
    if mismatched := {key: value for key, value in expected.items() if getattr(settings, key) != value}:
        current = ", ".join(f"{key}: {str(getattr(settings, key)).lower()}" for key in mismatched)  # as in YAML
        fix = ", ".join(f"train.{key}: {str(value).lower()}" for key, value in mismatched.items())
        raise SettingsError(
            f"train.{current}, but the weights of {source} are already quantized differently: set {fix}; or use the "
            "model from before it was quantized"
        )


# Tokenizers.


def open_tokenizer(path: Path, remote_code: bool = False) -> Any:
    """Return the tokenizer of a model directory, unchanged.

    Raises BaseModelError if the tokenizer cannot be read, or has no fast version.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=remote_code)
    except Exception as error:  # any type, from a JSON error to a missing sentencepiece
        if "trust_remote_code" in str(error):
            raise BaseModelError(
                f"{path}: the tokenizer needs the model's Python code; set base.trust_remote_code to the value of "
                "base.source to run it, or add a tokenizer.json"
            ) from None
        raise BaseModelError(f"{path}: the tokenizer cannot be loaded ({str(error).splitlines()[0]})") from None
    if not tokenizer.is_fast:
        raise BaseModelError(
            f"{path}: the tokenizer has no fast version (tokenizer.json), so tokens cannot be mapped to text; add the "
            "model's tokenizer.json"
        )
    return tokenizer


def load_tokenizer(
    path: Path, template: Path | None = None, added: Sequence[str] = (), remote_code: bool = False
) -> Any:
    """Return the tokenizer of a model directory, ready for batches.

    Raises BaseModelError if the tokenizer cannot be read, has no fast version or no end-of-turn token; or the chat
    template is missing or invalid.

    Args:
        template: file with a chat template that replaces the tokenizer's own.
    """
    tokenizer = open_tokenizer(path, remote_code)
    if added:
        from ratchet.models import vocabulary  # imports torch, which is not needed otherwise

        vocabulary.add_tokens(tokenizer, added)
    if template is not None:
        try:
            tokenizer.chat_template = template.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise BaseModelError(f"{template}: the chat template cannot be read ({error})") from None
        if not tokenizer.chat_template.strip():
            raise BaseModelError(f"{template}: the chat template is empty")
    if not tokenizer.chat_template:
        raise BaseModelError(
            f"{path}: the tokenizer has no chat template; use the -Instruct variant of the model, or add a "
            "chat_template.jinja to its directory"
        )
    templates = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {"": tokenizer.chat_template}
    for text in templates.values():
        _compile_with_fixed_date(text, template or path)
    if tokenizer.eos_token_id is None:
        raise BaseModelError(f"{path}: the tokenizer has no eos_token, so answers could not end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # padding is masked everywhere, so its value does not matter
    return tokenizer


def load_project_tokenizer(layout: ProjectLayout, base: BaseCard) -> Any:
    """Return the tokenizer of the project's base, with its chat template and added tokens. Raises like
    `load_tokenizer`."""
    return load_tokenizer(locate(layout, base), layout.chat_template, base.added_tokens, base.remote_code)


def _compile_with_fixed_date(text: str, source: Path) -> None:
    """Compile a chat template with a fixed date; transformers caches the result and uses it for every rendering."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        compiled = _compile_jinja_template(text)
    except Exception as error:  # Jinja's errors; the line is in an attribute
        line = getattr(error, "lineno", None)
        location = f"{source}:{line}" if line else str(source)
        raise BaseModelError(f"{location}: the chat template is not valid Jinja ({error})") from None
    compiled.globals[DATE_FUNCTION] = TEMPLATE_DATE.strftime
