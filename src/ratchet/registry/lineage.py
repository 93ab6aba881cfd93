"""Where a model comes from, as one record: base, data, settings, run, code, libraries. No secret, and no row."""

import re
from dataclasses import dataclass
from typing import Any

from ratchet.config.schema import Settings
from ratchet.storage.code_version import code_version
from ratchet.storage.layout import Layout
from ratchet.storage.records.base import BaseCard, TrainReport
from ratchet.storage.records.dataset_card import DatasetCard
from ratchet.storage.records.export import Lineage, Scan

SECTIONS = ("base", "prepare", "train", "evaluate", "export", "gate")
"""What says what is learned or made. `machine` says how, `promote` whom to tell, and its hooks hold addresses."""

MASK = "***"

_IN_ADDRESSES = re.compile(r"(?<=://)[^/\s?#]*@")
"""User and password before the host (RFC 3986, 3.2.1)."""
_IN_QUERIES = re.compile(
    r"([?&#;](?:[\w.-]*(?:token|secret|password|passwd|signature|credential|api[_-]?key|access[_-]?key|authorization)"
    r"[\w.-]*|sig|key|auth|pwd)=)[^&#\s]+",
    re.IGNORECASE,
)
"""Values of parameters that are called like secrets, as in signed addresses of object stores."""
_TOKENS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|gh[opsur]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|sk-[\w-]{16,}"
    r"|xox[abpros]-[\w-]{10,}|AKIA[A-Z0-9]{16}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)
"""How keys of well-known services begin, and JSON web tokens."""


@dataclass(frozen=True)
class Origin:
    """What the stages before say."""

    base: BaseCard
    trained: TrainReport
    data: DatasetCard
    scan: Scan
    recipe: str
    """Digest of all that identifies the run: RunSpec, as canonical JSON."""


def lineage(layout: Layout, settings: Settings, origin: Origin, sbom_digest: str) -> Lineage:
    """The record. Whatever in the settings looks like a secret is masked, and where on this machine something lies:
    params.yaml is no place for the one, but a bundle travels further than it."""
    sections = settings.model_dump(mode="json", include=set(SECTIONS))
    return Lineage(
        base=origin.base.model_copy(update={"source": masked(origin.base.source)}),
        data_digest=origin.data.digest,
        data_rows=origin.data.splits,
        data_licence=settings.export.data_licence,
        settings={name: _masked(value) for name, value in sections.items()},
        run_id=origin.trained.run_id,
        kept_step=origin.trained.kept_step,
        code=code_version(),
        recipe=origin.recipe,
        sbom_digest=sbom_digest,
        scan=origin.scan,
    )


def masked(text: str) -> str:
    """A text without what looks like a secret in it; of a path on this machine, only the last name."""
    if text.startswith(("/", "~")) and "/" in text[1:]:
        return f"{MASK}/{text.rstrip('/').rpartition('/')[2]}"
    text = _IN_ADDRESSES.sub(f"{MASK}@", text)
    text = _IN_QUERIES.sub(rf"\g<1>{MASK}", text)
    return _TOKENS.sub(MASK, text)


def _masked(value: Any) -> Any:
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, dict):
        return {key: _masked(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_masked(one) for one in value]
    return value
