"""The hub's client: a commit's files, from the network or the cache, and what to say when they are in neither."""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from ratchet.config.schema import Base
from ratchet.errors import BaseModelError
from ratchet.storage import digests
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import BaseCard

_UNREAD = ("consolidated*", "*/*.safetensors", "*/*.bin", "*/*.json", "*/*.model", "*/*.txt")
"""The same weights once more for other programs, and what lies in folders: transformers reads neither."""


def download(repository: str, revision: str, wanted: Sequence[str]) -> Path:
    """Directory of a commit with the wanted files; from the cache when the hub cannot be asked.

    Args:
        repository: a hub id.
        revision: commit, tag or branch.
        wanted: names of files, with wildcards.

    Raises:
        BaseModelError: neither has it; says which models are cached.
    """
    try:
        return _snapshot(repository, revision, wanted, local_only=False)
    except Exception as error:  # the library raises a dozen unrelated types for network, name and permission
        found = find_cached(repository, revision, wanted)
        if found is None:
            raise _unavailable_error(repository, revision, error) from None
        return found


def _snapshot(repository: str, revision: str, wanted: Sequence[str], local_only: bool) -> Path:
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            repository,
            revision=revision,
            allow_patterns=list(wanted),
            ignore_patterns=list(_UNREAD),
            local_files_only=local_only,
        )
    )


def find_cached(repository: str, revision: str, wanted: Sequence[str]) -> Path | None:
    """The same from the cache alone; None when not all of it is there."""
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return _snapshot(repository, revision, wanted, local_only=True)
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def _unavailable_error(repository: str, revision: str, error: Exception) -> BaseModelError:
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    said = str(error).strip().splitlines()
    cause = said[0].split(". ")[0] if said else type(error).__name__
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        what = f"the hub answers: {cause}; check name, revision and HF_TOKEN"
    elif isinstance(error, HFValidationError):
        what = f"no hub id can be so written ({cause})"
    else:
        what = f"the hub cannot be reached ({cause}); {_describe_cache()}; check the network"
    return BaseModelError(f"base.source: {repository} at {revision}: {what}, or give a local directory")


def _describe_cache() -> str:
    """The models that lie in the hub's cache, with their commits, in words."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        repositories = frozenset()
    models = {
        found.repo_id: ", ".join(sorted(revision.commit_hash[: digests.SHORT] for revision in found.revisions))
        for found in repositories
        if found.repo_type == "model"
    }
    listed = "; ".join(f"{name} ({commits})" for name, commits in sorted(models.items()))
    return f"cached here are: {listed}" if listed else f"no model is cached in {constants.HF_HUB_CACHE}"


# Where a base model comes from: a directory, the hub, or our own tiny one. Everything is pinned by content.

TINY = "tiny"

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = "pytorch_model*.bin"
PICKLE_INDEX = "pytorch_model.bin.index.json"

_PATTERNS = (
    "config.json", "generation_config.json", INDEX,
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "README.md",
)  # fmt: skip
"""The files of a base model beside its weights; others (other formats, pictures) are neither fetched nor part of its
digest."""

_CODE = "*.py"
"""Fetched, and part of the digest, only when base.trust_remote_code asks for it."""

_WEIGHTLESS = ("README.md",)
"""Fetched for the licence, but no part of the model's identity."""


def fetch(layout: ProjectLayout, settings: Base) -> tuple[Path, str | None]:
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
    wanted = _download_patterns(settings.trust_remote_code is not None)
    path = download(settings.source, settings.revision, wanted)
    if settings.convert_pickles and not list_weight_files(path):
        path = download(settings.source, settings.revision, [*wanted, PICKLES, PICKLE_INDEX])
    return path, path.name  # the hub's cache names a snapshot's directory after its commit


def _download_patterns(code: bool) -> list[str]:
    return [*_PATTERNS, "*.safetensors", *([_CODE] if code else [])]


def locate(layout: ProjectLayout, card: BaseCard) -> Path:
    """Directory of the pinned base model. Raises BaseModelError when it is gone; `verify_files` compares its bytes."""
    if card.source == TINY or card.converted:
        path = layout.tiny_model
    elif card.revision is not None:
        wanted = _download_patterns(card.remote_code)
        return find_cached(card.source, card.revision, wanted) or download(card.source, card.revision, wanted)
    else:
        path = (layout.root / Path(card.source).expanduser()).resolve()
    if not path.is_dir():
        raise BaseModelError(f"{path}: the base model is gone; run stage base again (`dvc repro base`)")
    return path


def list_weight_files(path: Path) -> list[str]:
    """Names of the safetensors files that hold the model; empty when there are none.

    Raises:
        BaseModelError: a shard that the index names is missing, or the index is none.
    """
    index = path / INDEX
    if not index.exists():
        return [WEIGHTS] if (path / WEIGHTS).exists() else []
    return list_shards(index)


def list_shards(index: Path) -> list[str]:
    """Names of the files that an index of weights names, in order.

    Raises:
        BaseModelError: one of them is missing, or lies elsewhere; or the file is no index.
    """
    try:
        names = sorted({str(name) for name in json.loads(index.read_bytes())["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BaseModelError(f"{index}: no index of weights ({error}); bring the original file") from None
    if strange := [name for name in names if Path(name).name != name]:
        raise BaseModelError(f"{index}: {strange[0]} is no file beside it; bring the original file")
    if missing := [name for name in names if not (index.parent / name).exists()]:
        raise BaseModelError(f"{index.parent}: {len(missing)} of {len(names)} shards missing, first {missing[0]}")
    return names


def list_companion_files(path: Path, code: bool = False) -> list[str]:
    """Names of the files of a model directory that are no weights, the model card included; with `code` its modules."""
    modules = path.rglob(_CODE) if code else ()
    found = {one for pattern in _PATTERNS for one in path.glob(pattern)}
    return sorted(one.relative_to(path).as_posix() for one in found.union(modules))


def list_model_files(path: Path, code: bool = False) -> list[str]:
    """Names of the files that make up the model, in order.

    Args:
        path: its directory.
        code: whether the Python code that it brings along is part of it.

    Raises:
        BaseModelError: config, weights (every shard) or tokenizer are missing.
    """
    names = set(list_companion_files(path, code)) - set(_WEIGHTLESS)
    if "config.json" not in names:
        raise BaseModelError(f"{path}: no config.json; this is no model directory")
    weights = list_weight_files(path)
    if not weights:
        raise BaseModelError(f"{path}: no weights (*.safetensors){_missing_weights_hint(path)}")
    if not {"tokenizer.json", "tokenizer.model", "vocab.json"} & names:
        raise BaseModelError(f"{path}: no tokenizer (tokenizer.json); copy the one of the model there")
    return sorted({*names, *weights})


def _missing_weights_hint(path: Path) -> str:
    if pickles := sorted(found.name for found in path.glob(PICKLES)):
        return (
            f"; {pickles[0]} is a pickle: for the base, base.convert_pickles: true converts it, running no code of it; "
            "any other model must come as safetensors (`save_pretrained` of transformers writes them)"
        )
    if other := sorted(found.name for found in path.glob("*.safetensors")):
        return f" of the name {WEIGHTS}, nor an index of them; {other[0]} is not what transformers reads"
    return "; of a base that has only pickles (*.bin) base.convert_pickles: true makes safetensors"


def fingerprint(path: Path, code: bool = False) -> dict[str, str]:
    """SHA-256 of every file that makes up the model. Raises BaseModelError as `list_model_files`."""
    return {name: digests.hash_file(path / name) for name in list_model_files(path, code)}


def verify_files(path: Path, expected: dict[str, str]) -> None:
    """Compare the bytes at hand with the pinned ones. Raises BaseModelError naming the first file that differs."""
    found = fingerprint(path, code=any(name.endswith(".py") for name in expected))
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            state = "missing" if name not in found else "new" if name not in expected else "changed"
            raise BaseModelError(f"{path / name}: {state} since the base was pinned; run `dvc repro base`")


def read_config(path: Path) -> dict[str, Any]:
    """Contents of config.json. Raises BaseModelError when it is not the config of a model."""
    file = path / "config.json"
    try:
        config = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise BaseModelError(f"{path}: no config.json; this is no model directory") from None
    except ValueError as error:
        raise BaseModelError(f"{file}: not the config of a model ({error}); bring the original file") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise BaseModelError(f"{file}: not the config of a model (no model_type in it); bring the original file")
    return config


def read_hidden_size(path: Path) -> int | None:
    """Width of a model, or of its part that reads text, by its config.json; None where that has no such name.

    Raises BaseModelError as `read_config` does.
    """
    config = read_config(path)
    text = config.get("text_config")
    width = (text if isinstance(text, dict) else config).get("hidden_size")
    return width if isinstance(width, int) else None


def require_pinned_code(path: Path) -> None:
    """Raises BaseModelError when code that is to be trusted lies in another repository, where nothing pins it."""
    for name in ("config.json", "tokenizer_config.json"):
        file = path / name
        try:
            classes = json.loads(file.read_bytes()).get("auto_map", {}) if file.is_file() else {}
            named = [one for value in classes.values() for one in (value if isinstance(value, list) else [value])]
        except (ValueError, AttributeError) as error:
            raise BaseModelError(f"{file}: not as transformers writes it ({error}); bring the original file") from None
        if elsewhere := [one for one in named if one and "--" in one]:
            raise BaseModelError(
                f"base.trust_remote_code: {file} takes its code from another repository ({elsewhere[0]}), which "
                "base.revision does not pin; copy that code beside it, and name it without `--`"
            )


def read_tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every stored tensor by name, from the headers alone. Raises BaseModelError for a damaged file."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, tuple[int, ...]] = {}
    for name in list_weight_files(path):
        try:
            with safe_open(str(path / name), framework="np") as tensors:
                found |= {key: tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise BaseModelError(f"{path / name}: damaged or cut short ({error}); bring the original file") from None
    return found


TEMPLATE_DATE = datetime(2024, 7, 26)
"""What `strftime_now` says in chat templates: Llama 3.1's own falls back to it. Data must not depend on the day."""


def open_tokenizer(path: Path, remote_code: bool = False) -> Any:
    """The tokenizer of a model directory as it is there.

    Raises:
        BaseModelError: it cannot be read, or is not a fast one.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=remote_code)
    except Exception as error:  # anything from a JSON error to a missing sentencepiece
        if "trust_remote_code" in str(error):
            raise BaseModelError(
                f"{path}: the tokenizer is Python code that the model brings along; repeat base.source in "
                "base.trust_remote_code to let it run, or bring a tokenizer.json"
            ) from None
        raise BaseModelError(f"{path}: the tokenizer cannot be loaded ({str(error).splitlines()[0]})") from None
    if not tokenizer.is_fast:
        raise BaseModelError(
            f"{path}: the tokenizer has no fast version (tokenizer.json), so it cannot say which token is which text; "
            "bring the tokenizer.json of the model"
        )
    return tokenizer


def load_tokenizer(
    path: Path, template: Path | None = None, added: Sequence[str] = (), remote_code: bool = False
) -> Any:
    """The tokenizer of a model directory, ready for batches.

    Args:
        path: the directory.
        template: a file that is its chat template instead of its own.
        added: tokens that it gets beside its own (base.added_tokens).
        remote_code: whether code that it brings along may run.

    Raises:
        BaseModelError: it cannot be read, is not a fast one, or has no end-of-turn token; the chat template is missing
            or no Jinja.
    """
    tokenizer = open_tokenizer(path, remote_code)
    if added:
        from ratchet.models import vocabulary  # imports torch, which a tokenizer needs for nothing else

        vocabulary.add_tokens(tokenizer, added)
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
