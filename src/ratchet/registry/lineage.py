"""Where a model comes from, as one record: base, data, settings, run, code, libraries. No secret, and no row."""

import json
import platform
import re
import uuid
from collections.abc import Iterator, Mapping
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

from ratchet.config.schema import Settings
from ratchet.storage import digests, files
from ratchet.storage.code_version import DISTRIBUTION, code_version
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import BaseCard, TrainReport
from ratchet.storage.records.data import DatasetCard
from ratchet.storage.records.export import BaseScan, ModelLineage

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
class ModelOrigin:
    """What the stages before say."""

    base: BaseCard
    trained: TrainReport
    data: DatasetCard
    scan: BaseScan
    recipe: str
    """Digest of all that identifies the run: RunSpec, as canonical JSON."""


def build_lineage(layout: ProjectLayout, settings: Settings, origin: ModelOrigin, sbom_digest: str) -> ModelLineage:
    """The record. Whatever in the settings looks like a secret is masked, and where on this machine something lies:
    params.yaml is no place for the one, but a bundle travels further than it."""
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
    """A text without what looks like a secret in it; of a path on this machine, only the last name."""
    if text.startswith(("/", "~")) and "/" in text[1:]:
        return f"{MASK}/{text.rstrip('/').rpartition('/')[2]}"
    text = _IN_ADDRESSES.sub(f"{MASK}@", text)
    text = _IN_QUERIES.sub(rf"\g<1>{MASK}", text)
    return _TOKENS.sub(MASK, text)


def _mask_value(value: Any) -> Any:
    if isinstance(value, str):
        return mask_secrets(value)
    if isinstance(value, dict):
        return {key: _mask_value(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_mask_value(one) for one in value]
    return value


# The bill of materials of an exported model, as CycloneDX 1.6: libraries, base, data.
#
# Equal inputs give equal bytes: there is no time in it, and its serial number follows from what it says. Libraries are
# those that are installed here and that Ratchet needs, with those that they need (importlib.metadata); versions and
# licences as their authors declare them (PEP 639, or classifiers).

LONGEST_LICENCE = 100
"""Characters: some libraries put the text of the licence where its name belongs."""


@dataclass(frozen=True)
class SbomContents:
    """What the bill names beside libraries."""

    name: str
    """Of the model that is exported."""
    model_digest: str
    base: BaseCard
    data_digest: str
    data_rows: Mapping[str, int]
    """By split."""
    data_licence: str | None


@dataclass(frozen=True)
class InstalledLibrary:
    """What an installed library says of itself, read once."""

    name: str
    version: str
    declared: PackageMetadata
    needs: tuple[Requirement, ...]

    @property
    def ref(self) -> str:
        """Its package URL."""
        found: str = PackageURL(type="pypi", name=self.name, version=self.version).to_string()
        return found

    def needed(self, extras: frozenset[str] = frozenset()) -> Iterator[tuple[str, frozenset[str]]]:
        """Names of what it needs on this machine, each with the extras that are asked for."""
        for need in self.needs:
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                yield canonicalize_name(need.name), frozenset(need.extras)

    def field(self, name: str) -> list[str]:
        """Every value that it declares under a name."""
        return self.declared.get_all(name) or []


def write_sbom(contents: SbomContents, target: Path) -> str:
    """Write the bill; returns the SHA-256 of its bytes."""
    libraries = installed_libraries()
    parts = {name: _library_component(found) for name, found in libraries.items()}
    base, data, python = _base_component(contents.base), _data_component(contents), _python_component()
    subject = Component(
        type=ComponentType.MACHINE_LEARNING_MODEL, name=contents.name, version=contents.model_digest[: digests.SHORT],
        bom_ref="model", properties=[Property(name="ratchet:digest", value=contents.model_digest)],
    )  # fmt: skip
    bom = Bom(components=[base, data, python, *parts.values()])
    bom.metadata.component = subject
    bom.register_dependency(subject, [base, data, parts[DISTRIBUTION]])
    for name, part in parts.items():
        needed = sorted({other for other, _ in libraries[name].needed() if other in parts})
        bom.register_dependency(part, [parts[other] for other in needed])
    value = json.loads(JsonV1Dot6(bom).output_as_string())
    del value["metadata"]["timestamp"], value["serialNumber"]
    value["serialNumber"] = uuid.uuid5(uuid.NAMESPACE_OID, digests.hash_json(value)).urn
    written = files.json_bytes(value)
    files.write_atomic(target, written)
    return digests.hash_bytes(written)


def installed_libraries() -> dict[str, InstalledLibrary]:
    """Every installed library that Ratchet needs, by name; itself included."""
    found: dict[str, InstalledLibrary] = {}
    left: list[tuple[str, frozenset[str]]] = [(DISTRIBUTION, frozenset())]
    seen = set(left)
    while left:
        name, extras = left.pop()
        try:
            one = found[name] if name in found else _read_library(name)
        except PackageNotFoundError:
            continue  # a library works without what it calls required more often than one would think
        found[name] = one
        fresh = [need for need in one.needed(extras) if need not in seen]
        seen.update(fresh)
        left += fresh
    return dict(sorted(found.items()))


def _read_library(name: str) -> InstalledLibrary:
    declared = distribution(name).metadata
    needs = tuple(map(Requirement, declared.get_all("Requires-Dist") or []))
    return InstalledLibrary(name, declared["Version"], declared, needs)


def _library_component(one: InstalledLibrary) -> Component:
    return Component(
        type=ComponentType.LIBRARY, name=one.name, version=one.version, bom_ref=one.ref,
        purl=PackageURL.from_string(one.ref), licenses=_licences(one),
    )  # fmt: skip


def _licences(one: InstalledLibrary) -> list[Any]:
    """As declared: an SPDX expression (PEP 639), else classifiers, else what stands in the field `License`."""
    make = LicenseFactory()
    if expressions := one.field("License-Expression"):
        return [make.make_from_string(expressions[0])]
    classifiers = [text for text in one.field("Classifier") if text.startswith("License :: ")]
    if names := sorted({text.rpartition(" :: ")[2] for text in classifiers} - {"OSI Approved"}):
        return [DisjunctiveLicense(name=name) for name in names]
    plain = "".join(one.field("License")).strip()
    if plain and plain != "UNKNOWN" and len(plain) <= LONGEST_LICENCE and "\n" not in plain:
        return [make.make_from_string(plain)]
    return []


def _parse_licence(licence: str | None) -> list[Any]:
    return [LicenseFactory().make_from_string(licence)] if licence else []


def _python_component() -> Component:
    version = platform.python_version()
    return Component(
        type=ComponentType.PLATFORM, name=platform.python_implementation(), version=version, bom_ref=f"python@{version}"
    )


def _base_component(card: BaseCard) -> Component:
    """The base model. One of the hub has a package URL (purl-spec, type huggingface)."""
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


def _data_component(contents: SbomContents) -> Component:
    """The rows: how many, and their fingerprint; nothing of what they say."""
    rows = [Property(name=f"ratchet:rows:{split}", value=str(rows)) for split, rows in contents.data_rows.items()]
    return Component(
        type=ComponentType.DATA, name="training data", version=contents.data_digest[: digests.SHORT], bom_ref="data",
        licenses=_parse_licence(contents.data_licence),
        properties=[Property(name="ratchet:digest", value=contents.data_digest), *rows],
    )  # fmt: skip
