"""Records the origin of a model (base, data, settings, run, code, libraries), without secrets and rows of the data.

This module also writes the model's software bill of materials (SBOM) as CycloneDX 1.6. Equal inputs give equal bytes:
the SBOM contains no time, and its serial number is computed from its content. It lists Ratchet's installed
dependencies, direct and indirect (importlib.metadata), with the versions and licences that their authors declare (PEP
639, or classifiers).
"""

import json
import platform
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageMetadata, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ratchet.config.extras import DISTRIBUTION
from ratchet.config.settings import Settings
from ratchet.storage import digests, files
from ratchet.storage.digests import code_version
from ratchet.storage.records.base import BaseCard
from ratchet.storage.records.data import DatasetCard
from ratchet.storage.records.export import BaseScan, ModelLineage
from ratchet.storage.records.training import TrainReport

SECTIONS = ("base", "prepare", "train", "evaluate", "export", "gate")
"""Sections of params.yaml that affect the model. `machine` and `promote` do not affect it, and the hooks in `promote`
contain addresses."""

MASK = "***"
"""Replaces secrets and directories."""

_USER_INFO = re.compile(r"(?<=://)[^/\s?#]*@")
"""User and password before the host of an address (RFC 3986, 3.2.1)."""
_SECRET_PARAMETERS = re.compile(
    r"([?&#;](?:[\w.-]*(?:token|secret|password|passwd|signature|credential|api[_-]?key|access[_-]?key|authorization)"
    r"[\w.-]*|sig|key|auth|pwd)=)[^&#\s]+",
    re.IGNORECASE,
)
"""Query parameters whose names indicate secrets, with their values, as in signed addresses of object stores."""
_TOKENS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|gh[opsur]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|sk-[\w-]{16,}"
    r"|xox[abpros]-[\w-]{10,}|AKIA[A-Z0-9]{16}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)
"""Keys of well-known services, recognized by their prefix, and JSON web tokens."""

MAX_LICENCE_CHARACTERS = 100
"""Maximum length of a licence name. A longer value is the text of the licence, which some libraries declare instead."""


@dataclass(frozen=True)
class ModelOrigin:
    """Records of earlier stages."""

    base: BaseCard
    trained: TrainReport
    data: DatasetCard
    scan: BaseScan
    recipe: str
    """Digest of everything that identifies the run: RunSpec as canonical JSON."""


def build_lineage(settings: Settings, origin: ModelOrigin, sbom_digest: str) -> ModelLineage:
    """Build the record. Values that look like secrets or absolute paths are masked, because bundles are published."""
    sections = settings.model_dump(mode="json", include=set(SECTIONS))
    return ModelLineage(
        base=origin.base.model_copy(update={"source": mask_secrets(origin.base.source)}),
        data_digest=origin.data.digest,
        data_rows=origin.data.splits,
        data_licence=settings.export.data_licence,
        settings={name: _mask_value(value) for name, value in sections.items()},
        run_id=origin.trained.run_id,
        kept_step=origin.trained.kept_step,
        code=code_version(),
        recipe=origin.recipe,
        sbom_digest=sbom_digest,
        scan=origin.scan,
    )


def mask_secrets(text: str) -> str:
    """Mask everything in a text that looks like a secret, and the directories of an absolute path."""
    if text.startswith(("/", "~")) and "/" in text[1:]:
        return f"{MASK}/{text.rstrip('/').rpartition('/')[2]}"
    text = _USER_INFO.sub(f"{MASK}@", text)
    text = _SECRET_PARAMETERS.sub(rf"\g<1>{MASK}", text)
    return _TOKENS.sub(MASK, text)


def _mask_value(value: Any) -> Any:
    if isinstance(value, str):
        return mask_secrets(value)
    if isinstance(value, dict):
        return {key: _mask_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_mask_value(item) for item in value]
    return value


# --------------------------------------------------------------------------------------------------------------- SBOM


def write_sbom(
    target: Path, name: str, model_digest: str, base: BaseCard, data: DatasetCard, data_licence: str | None
) -> str:
    """Write the SBOM of the exported model with this name and digest, and return the SHA-256 of its bytes."""
    libraries = installed_libraries()
    components = {}
    for library, metadata in libraries.items():
        url = PackageURL(type="pypi", name=library, version=metadata["Version"])
        components[library] = Component(
            type=ComponentType.LIBRARY, name=library, version=metadata["Version"], bom_ref=url.to_string(), purl=url,
            licenses=_licences(metadata),
        )  # fmt: skip
    base_model = _base_component(base)
    rows = [Property(name=f"ratchet:rows:{split}", value=str(rows)) for split, rows in data.splits.items()]
    training_data = Component(
        type=ComponentType.DATA, name="training data", version=data.digest[: digests.SHORT], bom_ref="data",
        licenses=_parse_licence(data_licence), properties=[Property(name="ratchet:digest", value=data.digest), *rows],
    )  # fmt: skip
    version = platform.python_version()
    python = Component(
        type=ComponentType.PLATFORM, name=platform.python_implementation(), version=version, bom_ref=f"python@{version}"
    )
    subject = Component(
        type=ComponentType.MACHINE_LEARNING_MODEL, name=name, version=model_digest[: digests.SHORT],
        bom_ref="model", properties=[Property(name="ratchet:digest", value=model_digest)],
    )  # fmt: skip
    bom = Bom(components=[base_model, training_data, python, *components.values()])
    bom.metadata.component = subject
    bom.register_dependency(subject, [base_model, training_data, components[DISTRIBUTION]])
    for library, component in components.items():
        required = sorted({other for other, _ in _required_libraries(libraries[library]) if other in components})
        bom.register_dependency(component, [components[other] for other in required])
    document = json.loads(JsonV1Dot6(bom).output_as_string())
    del document["metadata"]["timestamp"], document["serialNumber"]
    document["serialNumber"] = uuid.uuid5(uuid.NAMESPACE_OID, digests.hash_json(document)).urn
    content = files.json_bytes(document)
    files.write_atomic(target, content)
    return digests.hash_bytes(content)


def installed_libraries() -> dict[str, PackageMetadata]:
    """Return the metadata of Ratchet and of all installed libraries that it requires, directly or indirectly."""
    libraries: dict[str, PackageMetadata] = {}
    queue: list[tuple[str, frozenset[str]]] = [(DISTRIBUTION, frozenset())]
    seen = set(queue)
    while queue:
        name, extras = queue.pop()
        try:
            libraries[name] = distribution(name).metadata
        except PackageNotFoundError:
            continue  # many libraries work without some of their declared requirements
        new = [required for required in _required_libraries(libraries[name], extras) if required not in seen]
        seen.update(new)
        queue += new
    return dict(sorted(libraries.items()))


def _required_libraries(
    metadata: PackageMetadata, extras: frozenset[str] = frozenset()
) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield name and extras of each library that a library, with these extras of its own, requires on this machine."""
    for requirement in map(Requirement, metadata.get_all("Requires-Dist") or []):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield canonicalize_name(requirement.name), frozenset(requirement.extras)


def _licences(metadata: PackageMetadata) -> list[Any]:
    """Return the declared licences: an SPDX expression (PEP 639), else classifiers, else the field `License`."""
    factory = LicenseFactory()
    if expressions := metadata.get_all("License-Expression"):
        return [factory.make_from_string(expressions[0])]
    classifiers = [text for text in metadata.get_all("Classifier") or [] if text.startswith("License :: ")]
    if names := sorted({text.rpartition(" :: ")[2] for text in classifiers} - {"OSI Approved"}):
        return [DisjunctiveLicense(name=name) for name in names]
    text = "".join(metadata.get_all("License") or []).strip()
    if text and text != "UNKNOWN" and len(text) <= MAX_LICENCE_CHARACTERS and "\n" not in text:
        return [factory.make_from_string(text)]
    return []


def _parse_licence(licence: str | None) -> list[Any]:
    return [LicenseFactory().make_from_string(licence)] if licence else []


def _base_component(card: BaseCard) -> Component:
    """Return the base model, with a package URL if it comes from the Hugging Face hub (purl-spec, type huggingface)."""
    purl, version = None, card.revision or card.digest[: digests.SHORT]
    if card.revision is not None:
        owner, _, name = card.source.rpartition("/")
        purl = PackageURL(type="huggingface", namespace=owner, name=name, version=card.revision.lower())
    return Component(
        type=ComponentType.MACHINE_LEARNING_MODEL, name=card.source, version=version, bom_ref="base",
        purl=purl, licenses=_parse_licence(card.licence),
        properties=[
            Property(name="ratchet:architecture", value=card.architecture),
            Property(name="ratchet:digest", value=card.digest),
            Property(name="ratchet:parameters", value=str(card.parameters)),
        ],
    )  # fmt: skip
