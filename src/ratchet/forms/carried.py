"""Whether the formats that are asked for can carry a model: said before hours are spent on it."""

from pathlib import Path

from ratchet.config import Settings
from ratchet.formats import gguf, llama_tools, onnx
from ratchet.formats.llama_tools import Tools


def tools(settings: Settings, root: Path) -> tuple[Path | None, Tools]:
    """The directory of llama.cpp that the settings name, and its tools. Raises SettingsError when there are none."""
    named = settings.machine.llama_cpp
    directory = None if named is None else root / Path(named).expanduser()
    return directory, llama_tools.find(directory)


def require(model: Path, settings: Settings, root: Path) -> None:
    """Ask every format, by config and tokenizer alone.

    Args:
        model: directory of the base, which has the architecture and the tokenizer of what will be exported.
        root: of the project.

    Raises:
        SettingsError: an architecture, or a type, that a format cannot have here; says which it can.
        BaseModelError: a tokenizer that GGUF cannot represent.
    """
    wanted = settings.export
    directory, found = tools(settings, root)
    if wanted.gguf.types:
        gguf.require(model, wanted.gguf.types, directory)
    llama_tools.require(found, wanted.gguf.types)
    if wanted.onnx.types:
        onnx.require(model)
