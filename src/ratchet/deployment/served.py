"""Everything that serving adds to the folder of a promoted model, before it is signed."""

from pathlib import Path

from ratchet.deployment import mlmodel, serving
from ratchet.records_export import Bundle


def files_of(export: Path, bundle: Bundle, name: str) -> dict[str, bytes]:
    """Files for MLflow, Ollama, llama.cpp and vLLM, by their names in the folder of the promoted model.

    Args:
        export: directory of the export.
        bundle: what was exported.
        name: of the registered model.

    Raises:
        DamagedError: the merged model in the export has no usable config.json.
    """
    return mlmodel.files_of(export / "hf") | serving.files_of(export / "hf", bundle, name)
