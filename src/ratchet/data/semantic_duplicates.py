"""Finds rows of the same meaning in other words, by embeddings of a model in a local folder.

Two rows are semantic duplicates if the cosine of their embeddings is at least the threshold (Abbas et al. 2023,
SemDeDup). Signs of random projections (Charikar 2002) find candidates in linear time, as MinHash does for
near-duplicates, and each candidate pair is verified with the cosine. Embeddings and the signs are in temporary files.
"""

import math
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ratchet.config.extras import require_libraries
from ratchet.config.prepare import SemanticDuplicateSettings
from ratchet.data.deduplication import RowCluster, SortRows, cluster_similar_rows
from ratchet.data.row_table import RowTable
from ratchet.errors import DataError
from ratchet.storage import digests
from ratchet.storage.progress import report_progress

SETTING = "prepare.semantic_duplicates.model"
_SEED = 20
_BANDS = 48
_FOUND_SHARE = 0.95  # share of the pairs at the threshold that share a band, and so are found
_BATCH_ROWS = 1024
_PICKLES = (".bin", ".pt", ".pkl", ".pickle", ".ckpt")


class Embedder:
    """Function from texts to embeddings of length 1, by a sentence-transformers or model2vec model in a folder."""

    digest: str
    """Digest of the files of the model."""

    def __init__(self, folder: Path, name: str) -> None:
        """Load the model on the CPU, where equal inputs give equal embeddings.

        Raises:
            MissingLibraryError: sentence-transformers is not installed.
            DataError: the folder has no model, has pickles, or cannot be loaded.
        """
        require_libraries(SETTING, "semantic")
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        if pickles := [file for file in names if file.endswith(_PICKLES)]:
            raise DataError(
                f"params.yaml: {SETTING}: {name} holds {pickles[0]}, which may be a pickle that runs code; use a model "
                "whose weights are safetensors, and remove the other files"
            )
        lacking = [
            text
            for text, is_there in (
                ("modules.json", "modules.json" in names),
                ("*.safetensors", any(file.endswith(".safetensors") for file in names)),
            )
            if not is_there
        ]
        if not folder.is_dir() or lacking:
            found = f"has no {' and no '.join(lacking)}" if folder.is_dir() else "is not a folder"
            raise DataError(
                f"params.yaml: {SETTING}: {name} {found}; name a folder that sentence-transformers or model2vec saved"
            )
        from sentence_transformers import SentenceTransformer

        try:
            self._model: Any = SentenceTransformer(
                str(folder), device="cpu", local_files_only=True, model_kwargs={"use_safetensors": True}
            )
        except Exception as error:  # from transformers, safetensors, tokenizers or the file system
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise DataError(f"params.yaml: {SETTING}: {name} cannot be loaded ({reason}); save it again") from error
        self.digest = digests.hash_tree(folder, names)

    def embed(self, texts: Sequence[str]) -> NDArray[np.float16]:
        """Return embeddings of length 1, [texts, dimensions]; zeros for a text without known tokens."""
        vectors = self._model.encode(list(texts), convert_to_numpy=True, show_progress_bar=False).astype(np.float32)
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        scaled = np.divide(vectors, norms, out=np.zeros_like(vectors), where=norms > 0)
        embeddings: NDArray[np.float16] = scaled.astype(np.float16)
        return embeddings


def choose_bits(threshold: float) -> int:
    """Return the number of bits in a band: the most for which 95 % of the pairs at the threshold share a band.

    A projection has the same sign for two embeddings at angle a with probability 1 - a / pi.
    """
    equal = 1 - math.acos(threshold) / math.pi
    per_band = 1 - (1 - _FOUND_SHARE) ** (1 / _BANDS)
    return max(1, min(32, int(math.log(per_band) / math.log(equal)))) if equal < 1 else 32


def cluster_semantic_duplicates(
    rows: NDArray[np.int64],
    sort_rows: SortRows,
    text_of: Callable[[int], str],
    embedder: Embedder,
    settings: SemanticDuplicateSettings,
    folder: Path,
) -> list[RowCluster]:
    """Return clusters of similar rows among `rows`, as `deduplication.cluster_duplicates` does.

    `folder` is for temporary files. Rows are compared by their position in `rows`, whose indices ascend.
    """
    count = len(rows)
    if not count:
        return []
    bits = choose_bits(settings.threshold)
    bands = np.dtype([(str(band), "u4") for band in range(_BANDS)])
    places = np.uint32(1) << np.arange(bits, dtype=np.uint32)
    with tempfile.TemporaryFile(dir=folder) as file, closing(RowTable(folder, bands)) as keys:
        planes = None
        for start in range(0, count, _BATCH_ROWS):
            block = embedder.embed([text_of(row) for row in rows[start : start + _BATCH_ROWS].tolist()])
            file.write(block.tobytes())
            if planes is None:
                planes = np.random.default_rng(_SEED).standard_normal((block.shape[1], _BANDS * bits), dtype=np.float32)
            signs = (block.astype(np.float32) @ planes > 0).reshape(len(block), _BANDS, bits)
            keys.extend((signs * places).sum(axis=2, dtype=np.uint32).view(bands)[:, 0])
        file.flush()
        vectors = np.memmap(file, dtype=np.float16, mode="r", shape=(count, block.shape[1]))

        def is_similar(first: int, second: int) -> bool:
            return float(vectors[first].astype(np.float32) @ vectors[second].astype(np.float32)) >= settings.threshold

        clusters = cluster_similar_rows(
            (keys.column(name) for name in keys.names), np.ones(count, dtype=np.bool_),
            lambda positions: np.searchsorted(rows, sort_rows(rows[positions])), is_similar,
            lambda done: report_progress("meanings compared", done, count),
        )  # fmt: skip
    return [RowCluster(int(rows[one.kept]), tuple(rows[list(one.dropped)].tolist())) for one in clusters]
