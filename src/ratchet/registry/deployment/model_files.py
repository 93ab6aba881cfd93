"""Everything that serving adds to the folder of a promoted model, before it is signed."""

from pathlib import Path

from ratchet.registry.deployment import server_files
from ratchet.storage.records.export import ModelBundle
from ratchet.storage.records.gate import ForcedPromotion


def build_model_files(
    export: Path, bundle: ModelBundle, name: str, forced: ForcedPromotion | None = None
) -> dict[str, bytes]:
    """Model card, and files for MLflow, Ollama, llama.cpp and vLLM, by their names in the promoted model's folder.

    Args:
        export: directory of the export.
        bundle: what was exported.
        name: of the registered model.
        forced: who promoted it against the verdict; card and commands say so.

    Raises:
        DamagedFileError: the merged model in the export has no usable config.json.
    """
    return server_files.mlmodel_files(export / "hf") | server_files.build_server_files(
        export / "hf", bundle, name, forced
    )
