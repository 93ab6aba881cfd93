"""`ratchet audit`: who trained, judged, approved, promoted and deployed a model, and whether every proof fits.

Each fact has the file or digest that proves it. A fact is verified, not verifiable on this machine, or does not fit.
The checks are those of `ratchet verify`, of the ledger and of the gate. The command changes nothing; with a server, it
fetches the model's folder if this machine lacks it. It does not load torch.
"""

import dataclasses
import json
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from ratchet.config import units
from ratchet.config.gate import Gate
from ratchet.config.train import Train
from ratchet.data import token_files
from ratchet.data.harness_tasks import fingerprint_tasks
from ratchet.errors import (
    BaseModelError,
    ChampionError,
    DamagedFileError,
    DataError,
    RatchetError,
    SettingsError,
    TrackingError,
)
from ratchet.models import base_model
from ratchet.quality_gate import test_sets
from ratchet.quality_gate.decision import decide_verdict
from ratchet.quality_gate.evidence import read_evidence, rules_digest
from ratchet.redaction import redact
from ratchet.registry import approvals, keys, ledger, model_store, promotion, provenance, signature
from ratchet.registry.deployment import release as releases
from ratchet.registry.deployment.model_card import describe_forced
from ratchet.runs.directory import RunPaths
from ratchet.stages.project import Project
from ratchet.stages.promote import check_alias
from ratchet.stages.verify import VerifyFinding, verify
from ratchet.storage import digests, files, html
from ratchet.storage.digests import SHORT
from ratchet.storage.records.base import BaseCard, Record, flatten
from ratchet.storage.records.evaluation import EvaluationReport
from ratchet.storage.records.export import ModelBundle, ModelLineage
from ratchet.storage.records.gate import Champion, ChampionFile, ForcedPromotion, Promotion, Verdict, read_champion
from ratchet.storage.records.provenance import ModelProvenance, TrainingProvenance
from ratchet.tracking.mlflow.registry import MlflowModelRegistry

AuditSection = Literal["model", "data", "training", "judgement", "approvals", "promotion", "deployment"]
SECTIONS: tuple[AuditSection, ...] = get_args(AuditSection)
FactStatus = Literal["verified", "unverified", "contradicted"]

SHOWN_LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes", "datasets")
"""Libraries whose versions the page shows; sbom.json has all of them."""
MAX_METRICS = 6

R = TypeVar("R", bound=Record)


class AuditFact(Record):
    """A fact about the model, and its check."""

    section: AuditSection
    name: str
    text: str
    status: FactStatus
    proof: str
    """The file or digest that proves the fact. For `unverified` the reason, for `contradicted` the problem."""


class AuditReport(Record):
    """Result of `ratchet audit`: all facts, in the order of the page."""

    model_name: str
    version: int
    model_digest: str
    time: str
    """Time of the audit: UTC, ISO 8601."""
    facts: tuple[AuditFact, ...]
    files: dict[str, str]
    """SHA-256 of each file of the promoted model, by name; empty if its folder is not here."""

    def list_facts(self, status: FactStatus) -> list[AuditFact]:
        """Return the facts with this status."""
        return [fact for fact in self.facts if fact.status == status]

    @property
    def is_consistent(self) -> bool:
        """Whether nothing contradicts a fact."""
        return not self.list_facts("contradicted")


def audit(project: Project, version: int | None = None, deployments: Sequence[Path] = ()) -> AuditReport:
    """Check every fact about a promoted version.

    Args:
        project: the project, or a clone of it.
        version: the registered version; None: the champion.
        deployments: deployment directories (`ratchet deploy DIR`), whose releases of the version are checked.

    Raises:
        ChampionError: the version was never promoted, or there is no champion.
        SettingsError: a path in `deployments` is not a deployment directory.
    """
    for path in deployments:
        if not (path / releases.OWNER).is_file():
            raise SettingsError(f"--release {path}: not a deployment directory (it has no {releases.OWNER})")
    auditor = _Auditor(project)
    auditor.read_history(version)
    auditor.check_model()
    auditor.check_data()
    auditor.check_training()
    auditor.check_judgement()
    auditor.check_approvals()
    auditor.check_promotion()
    auditor.check_deployments(deployments)
    return AuditReport(
        model_name=auditor.registry.model_name,
        version=auditor.champion.version,
        model_digest=auditor.champion.model_digest,
        time=units.utc_timestamp(),
        facts=tuple(sorted(auditor.facts, key=lambda fact: SECTIONS.index(fact.section))),
        files=auditor.manifest.file_digests if auditor.manifest is not None else {},
    )


class _Auditor:
    """Collects facts. `read_history` comes first, then `check_model`; the other checks use their results."""

    def __init__(self, project: Project) -> None:
        self.layout, self.settings = project.layout, project.settings
        self.registry = MlflowModelRegistry.open(self.layout, self.settings)
        self.facts: list[AuditFact] = []
        self._section: AuditSection = "promotion"
        self.entries: list[Promotion] = []
        """Entries of the ledger; if its chain is broken, those that can be read."""
        self._own_entries: list[Promotion] = []
        """Those of the entries that are in the project's ledger."""
        self._is_chained = True
        """Whether the chain of the project's ledger is intact."""
        self.file: ChampionFile | None = None
        """The champion file; None if it is damaged."""
        self.origin: Promotion | None = None
        """Newest promotion of the model; None if the ledger lacks it."""
        self.manifest: files.Manifest | None = None
        self.bundle: ModelBundle | None = None
        self.verdict: Verdict | None = None
        self.report: EvaluationReport | None = None
        self.signed = ModelProvenance()
        self._is_intact = False
        """Whether every byte of the promoted model's folder is as signed."""

    # Facts.

    def _add(self, name: str, text: str, status: FactStatus, proof: str) -> None:
        name, text, proof = (html.escape_invisible(" ".join(redact(part).split())) for part in (name, text, proof))
        self.facts.append(AuditFact(section=self._section, name=name, text=text, status=status, proof=proof))

    def _verified(self, name: str, text: str, proof: str) -> None:
        self._add(name, text, "verified", proof)

    def _unverified(self, name: str, text: str, reason: str) -> None:
        self._add(name, text, "unverified", reason)

    def _contradicted(self, name: str, text: str, problem: str) -> None:
        self._add(name, text, "contradicted", problem)

    def _compare(self, name: str, text: str, proof: str, values: Mapping[str, object]) -> None:
        """Add a fact that is verified if all values are equal; the keys are the files that have the values."""
        first, *others = values.values()
        if all(other == first for other in others):
            self._verified(name, text, proof)
        else:
            differing = ", ".join(f"{file} has {_shorten(value)}" for file, value in values.items())
            self._contradicted(name, "differs", differing)

    def _state(self, name: str, text: str, file: str) -> None:
        """Add a fact that a file of the promoted model states."""
        if self._is_intact:
            self._verified(name, text, f"{file}, signed")
        else:
            self._unverified(name, text, f"{self._show(self._folder / file)}: its folder is not as it was signed")

    def _state_entry(self, name: str, text: str, entry: Promotion) -> None:
        """Add a fact that an entry of the ledger states."""
        if self._is_chained:
            self._verified(name, text, f"{self._describe_line(entry)}, {entry.digest[:SHORT]}")
        else:
            self._unverified(name, text, f"{self._describe_line(entry)}: the chain of the ledger is broken")

    def _add_finding(self, finding: VerifyFinding, name: str, text: str) -> None:
        """Add the result of a check of `ratchet verify`."""
        if finding.status == "ok":
            proof = f"{self._show(finding.path)}{f', SHA-256 {finding.digest[:SHORT]}' if finding.digest else ''}"
            self._verified(name, text, proof)
        else:
            where = self._show(finding.path)
            self._contradicted(name, finding.status, f"{where}: {finding.text.replace(str(finding.path), where)}")

    def _verify(self, path: Path, report: Callable[[str, str, str], None] | None = None) -> tuple[VerifyFinding, ...]:
        """Verify a folder as `ratchet verify` does. If it has nothing that can be verified, such as a manifest, report
        that (default: as not verifiable), and return nothing."""
        try:
            return tuple(verify([path], project=self.layout.root).findings)
        except SettingsError as error:
            (report or self._unverified)(self._show(path), "not checked", self._shorten_paths(str(error)))
            return ()

    @contextmanager
    def _report_damage(self, name: str, text: str = "cannot be read") -> Iterator[None]:
        """Turn the error of a damaged file into a fact that does not fit."""
        try:
            yield
        except (DamagedFileError, DataError, BaseModelError, ChampionError) as error:
            self._contradicted(name, text, self._shorten_paths(str(error)))

    def _show(self, path: Path) -> str:
        """Return a path relative to the project, if it is in the project."""
        return str(path.relative_to(self.layout.root)) if path.is_relative_to(self.layout.root) else str(path)

    def _shorten_paths(self, text: str) -> str:
        return text.replace(f"{self.layout.root}/", "")

    @property
    def _folder(self) -> Path:
        return self.layout.promoted_model(self.champion.model_digest)

    # Ledger, champion file and alias; found first, because they name the model.

    def read_history(self, version: int | None) -> None:
        """Read ledger and champion file, and find the version in them. Raises ChampionError if it is unknown."""
        own = self._own_entries = self._read_own_ledger()
        self.entries = self._read_shared_ledger(own)
        with self._report_damage("champion file"):
            self.file = read_champion(self.layout.champion)
        if self.file is not None and self._is_chained:
            self._check_champion_file(own, self.file)
        self.champion = self._find_champion(version)
        promoted = [entry for entry in self.entries if entry.model_digest == self.champion.model_digest]
        self.origin = next((entry for entry in reversed(promoted) if entry.action == "promote"), None)

    def _read_own_ledger(self) -> list[Promotion]:
        """Return the entries of the project's ledger; if its chain is broken, those that can be read."""
        path = self.layout.promotions
        with self._report_damage("ledger", "its chain is broken"):
            entries = ledger.read_entries(path)
            if entries:
                lines = units.format_count(len(entries), "line")
                newest = entries[-1]
                text = f"{lines}, chained up to the newest: {newest.action} of version {newest.version}, {newest.time}"
                self._verified("ledger", text, f"{self._show(path)}, newest line {newest.digest[:SHORT]}")
            return entries
        self._is_chained, readable = False, []
        for line in path.read_bytes().splitlines():
            with suppress_invalid():
                readable.append(Promotion.model_validate(json.loads(line)))
        return readable

    def _read_shared_ledger(self, own: list[Promotion]) -> list[Promotion]:
        """Return all entries, with those on the server that the project lacks."""
        if self.registry.shared is None:
            return own
        where, name = self.registry.where, "ledger on the server"
        try:
            shared = self.registry.shared.read()
            missing = (
                ledger.find_missing(self.layout.promotions, own, shared, where) if own and self._is_chained else shared
            )
        except TrackingError as error:
            self._unverified(name, "not compared", str(error))
            return own
        except (DamagedFileError, ChampionError) as error:
            self._contradicted(name, "differs, or cannot be read", self._shorten_paths(str(error)))
            return own
        count = units.format_count(len(shared), "line")
        extra = f"; {len(missing)} of them not fetched yet (`ratchet promotions`)" if own and missing else ""
        self._verified(name, f"{count}, equal to the project's{extra}" if own else count, where)
        return own + missing if self._is_chained else shared

    def _check_champion_file(self, own: list[Promotion], file: ChampionFile) -> None:
        """Compare the champion file with the one that the ledger's entries produce."""
        path = self._show(self.layout.champion)
        with self._report_damage("champion file", "differs from the ledger"):
            ledger.check_champion(self.layout, own, file)
            if file.champion is None:
                if own:
                    text, problem = "names no champion", f"{path}: the ledger does; restore the file from git"
                    self._contradicted("champion file", text, problem)
                return
            text = f"version {file.champion.version}"
            if file.ledger is None:
                self._unverified("champion file", text, f"{path}: it is older than the ledger")
                return
            self._verified("champion file", f"{text}, as the ledger's entries produce it", path)

    def _find_champion(self, version: int | None) -> Champion:
        """Find the version, or the champion: in the ledger, else in the champion file, and if they are damaged, in the
        registry."""
        file = self.file or ChampionFile()
        if version is None:
            if self.entries:
                return ledger.champion_of(self.entries[-1], self.entries)
            if file.champion is None:
                raise ChampionError(
                    f"{self.layout.champion}: there is no champion yet; `ratchet promote` makes one, and an audit is "
                    "about a promoted version"
                )
            return file.champion
        if of_version := [entry for entry in self.entries if entry.version == version]:
            return ledger.champion_of(of_version[-1], self.entries)
        if (found := promotion.find_version(file, version)) is not None:
            return found
        is_damaged = any(fact.status == "contradicted" for fact in self.facts)
        if is_damaged and (registered := self.registry.version(version)) is not None:
            return Champion(
                version=version, model_digest=registered.model_digest,
                adapter_digest=registered.tags.get(promotion.ADAPTER, ""),
                run_id=registered.tags.get(promotion.RUN, ""),
            )  # fmt: skip
        known = ", ".join(map(str, sorted({entry.version for entry in self.entries}))) or "none"
        raise ChampionError(f"version {version} of {self.registry.model_name} was never promoted; known: {known}")

    def _describe_line(self, entry: Promotion) -> str:
        where = self._show(self.layout.promotions) if entry in self._own_entries else self.registry.where
        return f"{where}, line {self.entries.index(entry) + 1}"

    # 1. The model.

    def check_model(self) -> None:
        """Check the folder of the promoted model, and state what the model is."""
        self._section = "promotion"
        self._open_folder()
        self._section = "model"
        name = f"{self.registry.model_name}, version {self.champion.version}"
        own = [entry for entry in self.entries if entry.version == self.champion.version]
        named = {f"line {self.entries.index(entry) + 1}": entry.model_digest for entry in own}
        proof = self._describe_line(own[-1]) if own else self._show(self.layout.champion)
        self._compare("name", name, proof, named or {"": ""})
        digest = self.champion.model_digest
        if self.bundle is None:
            self._unverified("digest", digest, self._missing_folder)
        else:
            values = {"the ledger": digest, self._show(self._folder / model_store.BUNDLE): self.bundle.model_digest}
            self._compare("digest", digest, "the ledger and bundle.json", values)
            formats = ", ".join(f"{a.name} ({a.runtime}, KL {a.distance.kl:.2g})" for a in self.bundle.artifacts)
            self._state("formats", formats or "not listed, because an earlier version exported it", "bundle.json")
        self._describe_terms()
        self._check_forced()

    @property
    def _missing_folder(self) -> str:
        folder = self._show(self._folder)
        return f"{folder} is not on this machine (git does not track mlruns/), and was not fetched from a server"

    def _open_folder(self) -> None:
        """Verify every byte and the signature of the model's folder, and read its records."""
        folder = self._folder
        try:
            if not folder.is_dir():
                self.registry.fetch_model(self.champion.model_digest)
        except TrackingError as error:
            self._unverified("fetched files", "none", str(error))
        except (ChampionError, DamagedFileError) as error:
            self._contradicted("fetched files", "differ or are missing", self._shorten_paths(str(error)))
        if not folder.is_dir():
            self._unverified("files and signature", "not checked", self._missing_folder)
            return
        findings = self._verify(folder, self._contradicted)
        with suppress_invalid():
            self.manifest = files.read_manifest(folder)
        count = len(self.manifest.files) if self.manifest is not None else 0
        for finding in findings:
            if finding.kind == "signature":
                self._add_finding(finding, "signature", finding.text)
            elif not _is_approval(finding):
                number = units.format_count(count, "file")
                text = f"{number}, {finding.size_bytes or 0:,} bytes, each as in the manifest"
                self._add_finding(finding, "files", text)
        self._is_intact = {"model", "signature"} <= {one.kind for one in findings if one.status == "ok"}
        self.bundle = self._load(ModelBundle, model_store.BUNDLE)
        self.verdict = self._load(Verdict, model_store.VERDICT)
        self.report = self._load(EvaluationReport, model_store.EVALUATION)
        if (folder / provenance.PROVENANCE).exists():
            self.signed = self._load(ModelProvenance, provenance.PROVENANCE) or ModelProvenance()

    def _load(self, kind: type[R], name: str) -> R | None:
        """Load a record of the folder. A damaged one is a fact of its own only if the folder is as signed."""
        try:
            return kind.load(self._folder / name)
        except (DamagedFileError, DataError) as error:
            if self._is_intact:
                self._contradicted(name, "cannot be read", self._shorten_paths(str(error)))
            return None

    def _describe_terms(self) -> None:
        """State when the version was champion, and why that ended."""
        terms = list(list_terms(self.entries, self.champion.version))
        for begin, end in terms:
            since = f"champion since {begin.time} ({begin.action} by {begin.actor})"
            if end is None:
                self._state_entry("champion", f"is champion; {since}", begin)
                continue
            how = "rolled back" if end.action == "rollback" else "replaced"
            why = f" ({end.reason})" if end.reason else ""
            text = f"{since}; {how} on {end.time} by {end.actor} with version {end.version}{why}"
            self._state_entry("champion", text, end)
        if not terms:
            self._unverified("champion", "unknown", f"{self._show(self.layout.promotions)}: has no line about it")

    def _check_forced(self) -> None:
        """Compare the mark of a forced promotion in the ledger with the signed one."""
        forced = ledger.champion_of(self.origin, self.entries).forced if self.origin else self.champion.forced
        text = describe_forced(forced) if forced else "no: the gate decided PROMOTE"
        if self.manifest is None or not self._is_intact:
            reason = self._missing_folder if self.manifest is None else "the model's folder is not as it was signed"
            self._unverified("forced", text, reason)
            return
        is_marked = model_store.FORCED in self.manifest.files
        marked = ForcedPromotion.load(self._folder / model_store.FORCED) if is_marked else None
        source = model_store.FORCED if forced else model_store.BUNDLE
        values = {"the ledger": forced, self._show(self._folder / model_store.FORCED): marked}
        self._compare("forced", text, f"the ledger and {source}, signed", values)

    # 2. Data.

    def check_data(self) -> None:
        """State on which data the model was trained, and check the data that are here."""
        self._section = "data"
        if self.bundle is None:
            self._unverified("data", "unknown", self._missing_folder)
            return
        lineage, digest = self.bundle.lineage, self.bundle.data_digest
        self._state("digest", digest, "bundle.json")
        if lineage is not None:
            rows = ", ".join(f"{count:,} {split}" for split, count in sorted(lineage.data_rows.items()))
            self._state("rows", rows, "bundle.json")
            self._state("licence", lineage.data_licence or "not declared (export.data_licence)", "bundle.json")
        is_here = self._check_prepared(digest)
        current = provenance.read_data(self.layout, digest) if is_here else None
        if current is not None and self.signed.data is not None:
            card = self._show(self.layout.dataset_card)
            if differing := _find_differences(current, self.signed.data):
                problem = f"{card}: {', '.join(differing)} differ from the signed {provenance.PROVENANCE}"
                self._contradicted("dataset card", "differs", problem)
            else:
                self._verified("dataset card", f"equal to the signed {provenance.PROVENANCE}", card)
        if (facts := self.signed.data or current) is None:
            reason = f"{self._show(self.layout.data)} is not on this machine, and {provenance.PROVENANCE} has no data"
            self._unverified("sources", "unknown", reason)
            return
        file = provenance.PROVENANCE if self.signed.data is not None else self._show(self.layout.dataset_card)
        state = self._state if self.signed.data is not None else self._verified
        for name, content in facts.sources.items():
            self._check_source(name, content, is_here)
        dropped = ", ".join(f"{count:,} {reason}" for reason, count in sorted(facts.dropped.items()))
        state("dropped", f"{facts.rows_in:,} rows read, {facts.rows_out:,} kept; dropped: {dropped or 'none'}", file)
        leaks = ", ".join(f"{count:,} rows share words with {name}" for name, count in sorted(facts.leaks.items()))
        state("leakage", leaks or "no evaluation set was compared with the rows", file)
        if facts.across_splits is not None:
            state("near-duplicates", f"{facts.across_splits:,} rows dropped that were in two splits", file)

    def _check_prepared(self, digest: str) -> bool:
        """Check the prepared data. Returns whether they are here, intact, and those of the model."""
        path = self.layout.data
        shown = self._show(path)
        if not path.is_dir():
            self._unverified("prepared rows", digest[:SHORT], f"{shown} is not on this machine")
            return False
        if not (findings := self._verify(path)):
            return False
        [finding] = findings
        if finding.status != "ok":
            self._add_finding(finding, "prepared rows", "")
            return False
        if provenance.read_data(self.layout, digest) is None:
            self._unverified("prepared rows", digest[:SHORT], f"{shown} has other data now")
            return False
        self._add_finding(finding, "prepared files", f"the splits of data {digest[:SHORT]}, every byte")
        with self._report_damage("prepared rows"):
            values = {"bundle.json": digest, shown: token_files.fingerprint_splits(path).content}
            self._compare(
                "prepared rows", "their digest, computed again from ids and tokens, is the signed one", shown, values
            )
        return True

    def _check_source(self, name: str, content: str, is_current: bool) -> None:
        """Compare a source file with its digest. With newer prepared data, the file may have changed since."""
        path = self.layout.root / name
        if not path.is_file():
            self._unverified(f"source {name}", content[:SHORT], f"{name} is not on this machine")
        elif digests.hash_file(path) == content:
            self._verified(f"source {name}", f"SHA-256 {content[:SHORT]}", name)
        elif is_current:
            self._contradicted(f"source {name}", content[:SHORT], f"{name}: changed since the rows were prepared")
        else:
            self._unverified(f"source {name}", content[:SHORT], f"{name} has changed; the project has other data now")

    # 3. Training.

    def check_training(self) -> None:
        """State how the model was trained, and check the run if it is here."""
        self._section = "training"
        if self.bundle is None:
            self._unverified("run", self.champion.run_id, self._missing_folder)
            return
        bundle, lineage = self.bundle, self.bundle.lineage
        values = {"the ledger": self.champion.run_id, "bundle.json": bundle.run_id}
        self._compare("run", bundle.run_id, "the ledger and bundle.json", values)
        if lineage is not None:
            self._describe_lineage(lineage)
        self._check_adapter(bundle)
        self._check_run(bundle)

    def _describe_lineage(self, lineage: ModelLineage) -> None:
        """State code, settings, libraries and base, and check the base if it is here."""
        now = digests.code_version()
        here = "the same code is installed here" if lineage.code == now else f"here: {now}"
        self._state("code", f"Ratchet {lineage.code} (version, digest of its source); {here}", "bundle.json")
        used = flatten(lineage.settings.get("train", {}))
        default = flatten(Train().model_dump(mode="json"))
        changed = [f"{key} {value}" for key, value in sorted(used.items()) if default.get(key) != value]
        text = f"{len(used)} settings of section train; not the default: {', '.join(changed) or 'none'}"
        self._state("settings", text, "bundle.json")
        if (libraries := self._read_libraries()) is not None:
            shown = ", ".join(f"{name} {libraries[name]}" for name in SHOWN_LIBRARIES if name in libraries)
            self._state("libraries", f"{len(libraries)} in the bill of materials: {shown}", model_store.SBOM)
        base = lineage.base
        commit = f" at {base.revision}" if base.revision else ""
        text = f"{base.source}{commit}, {base.architecture}, {base.parameters:,} weights, digest {base.digest[:SHORT]}"
        self._state("base", f"{text}, licence: {base.licence or 'not declared'}", "bundle.json")
        scan = lineage.scan
        found = f"pickles: {', '.join(scan.pickles) or 'none'}; suspicious: {', '.join(scan.suspicious) or 'nothing'}"
        self._state("base, scan", f"{units.format_count(scan.files, 'file')}; {found}; {scan.scanner}", "bundle.json")
        self._check_base(base)

    def _read_libraries(self) -> dict[str, str] | None:
        """Read the versions of all libraries from sbom.json; None if it cannot be read."""
        with suppress_invalid():
            components = json.loads((self._folder / model_store.SBOM).read_bytes())["components"]
            return {item["name"]: item.get("version", "?") for item in components if item["type"] == "library"}
        return None

    def _check_base(self, signed: BaseCard) -> None:
        """Compare the files of the base with their signed digests."""
        card = signed
        with suppress_invalid():  # the card of the stage names the directory, which the lineage may mask
            own = BaseCard.load(self.layout.base_card)
            card = own if own.digest == signed.digest else signed
        folder = base_model.find_local(self.layout, card)
        if folder is None:
            self._unverified("base, files", f"{len(signed.files)} files", f"{signed.source} is not on this machine")
        elif card is signed and folder.is_relative_to(self.layout.base):
            self._unverified("base, files", f"{len(signed.files)} files", f"{self._show(folder)} has another base now")
        else:
            with self._report_damage("base, files", "differ"):
                base_model.verify_files(folder, signed.files)
                count = units.format_count(len(signed.files), "file")
                self._verified("base, files", f"{count}, each with its signed digest", self._show(folder))

    def _check_adapter(self, bundle: ModelBundle) -> None:
        """Compute the digest of the adapter's files, and compare it with those in the records."""
        adapter = self._folder / "adapter"
        names = _list_files(adapter)
        values: dict[str, object] = {
            "the ledger": self.champion.adapter_digest,
            "bundle.json": bundle.adapter_digest,
            self._show(adapter): digests.hash_tree(adapter, names),
        }
        if self.report is not None:
            values[model_store.EVALUATION] = self.report.adapter_digest
        if self.verdict is not None:
            values[model_store.VERDICT] = self.verdict.adapter_digest
        text = f"{bundle.adapter_digest}, computed from {units.format_count(len(names), 'file')}"
        self._compare("adapter", text, ", ".join(values), values)
        weights = bundle.merge.adapters if bundle.merge is not None else {}
        if len(weights) > 1:
            merged = ", ".join(f"{sha[:SHORT]} x {weight:g}" for sha, weight in sorted(weights.items()))
            self._state("merged adapters", merged, "bundle.json")

    def _check_run(self, bundle: ModelBundle) -> None:
        """Check journal, spec, checkpoints and result of the run, and state what the journal says."""
        run, signed = RunPaths(self.layout.runs / bundle.run_id), self.signed.training
        findings = self._verify(run.root) if run.root.is_dir() else ()
        if not findings:
            if not run.root.is_dir():
                self._unverified("run directory", bundle.run_id, f"{self._show(run.root)} is not on this machine")
            if signed is None:
                reason = f"the journal is not on this machine, and {provenance.PROVENANCE} does not have its facts"
                self._unverified("who, where, when", "unknown", reason)
            else:
                self._describe_training(signed, self._state, provenance.PROVENANCE)
            return
        for finding in findings:
            if finding.status != "ok" or finding.kind in ("spec", "result"):
                texts = {"spec": f"its digest is the run id {bundle.run_id}", "result": "sealed, every byte"}
                self._add_finding(finding, finding.kind or "run directory", texts.get(finding.kind, finding.text))
        if checkpoints := [one for one in findings if one.kind == "checkpoint"]:
            text = f"{units.format_count(len(checkpoints), 'checkpoint')}, every byte"
            self._verified("checkpoints", text, self._show(run.checkpoints))
        self._check_result(run, bundle)
        journal = self._show(run.journal)
        if signed is None:
            facts = provenance.read_training(run, self._read_tags(bundle.run_id))
            reason = f"{journal}: its digest was not signed, because an earlier version promoted the model"
            if facts is not None:
                self._describe_training(facts, lambda name, text, _: self._unverified(name, text, reason), journal)
            else:
                self._unverified("who, where, when", "unknown", f"{journal}: has no event `finished`")
            return
        values = {journal: provenance.hash_start(run.journal, signed.journal_bytes) if run.journal.is_file() else None}
        values[f"{provenance.PROVENANCE}, signed,"] = signed.journal
        self._compare("journal", f"{signed.journal_bytes:,} bytes, every byte", journal, values)
        self._describe_training(signed, self._state, provenance.PROVENANCE)

    def _check_result(self, run: RunPaths, bundle: ModelBundle) -> None:
        """Compare the adapter in the result of the run with the promoted one."""
        adapter = run.result / "adapter"
        if adapter.is_dir():
            found = digests.hash_tree(adapter, _list_files(adapter))
            values = {self._show(adapter): found, "bundle.json": bundle.adapter_digest}
            self._compare("result", f"its adapter is {bundle.adapter_digest[:SHORT]}", self._show(adapter), values)

    def _read_tags(self, run_id: str) -> dict[str, str]:
        try:
            return self.registry.read_run_tags(run_id)
        except TrackingError as error:
            self._unverified("MLflow run", "not read", str(error))
            return {}

    def _describe_training(self, facts: TrainingProvenance, state: Callable[[str, str, str], None], file: str) -> None:
        """State where, when and with which interruptions the run was trained."""
        where = f"on {', '.join(facts.hosts) or 'an unknown machine'} ({'; '.join(facts.devices) or 'unknown device'})"
        state("where, when", f"{where}, from {facts.started} to {facts.finished}", file)
        tags = facts.tags
        missing = "no MLflow run of this training has it as a tag"
        for name, tag in (("who", ledger.ACTOR_TAG), ("git commit", "git.revision")):
            if tag not in tags:
                self._unverified(name, "unknown", missing)
        if ledger.ACTOR_TAG in tags:
            state("who", tags[ledger.ACTOR_TAG], file)
        if "git.revision" in tags:
            branch = f", branch {tags['git.branch']}" if "git.branch" in tags else ""
            changes = "with uncommitted changes" if tags.get("git.dirty") == "true" else "no uncommitted changes"
            state("git commit", f"{tags['git.revision']}{branch}, {changes}", file)
        ends = f" ({'; '.join(facts.attempt_ends)})" if facts.attempt_ends else ""
        attempts = f"{units.format_count(facts.attempts, 'attempt')}{ends}"
        state("attempts", f"{attempts}, {units.format_count(facts.repeated_steps, 'repeated step')}", file)
        skipped = "; ".join(f"{step}: {reason}" for step, reason in sorted(facts.skipped_steps.items()))
        state("steps", f"{facts.steps:,} ({facts.reason.replace('_', ' ')}); skipped: {skipped or 'none'}", file)
        if self.bundle is not None and facts.adapter_digest != self.bundle.adapter_digest:
            self._contradicted("adapter of the journal", facts.adapter_digest, f"{file}: the run made another adapter")

    # 4. Judgement.

    def check_judgement(self) -> None:
        """State evaluation and verdict, and check that the verdict follows from the evidence."""
        self._section = "judgement"
        if self.bundle is None or self.verdict is None or self.report is None:
            reason = self._missing_folder if self.bundle is None else "eval.json or verdict.json cannot be read"
            self._unverified("verdict", self.origin.decision or "none" if self.origin else "none", reason)
            return
        bundle, verdict, report = self.bundle, self.verdict, self.report
        evaluated = {"bundle.json": bundle.model_digest, model_store.EVALUATION: report.model_digest}
        shown = (bundle.evaluation or "")[:SHORT]
        self._compare("evaluation", f"SHA-256 {shown}, about this model", "eval.json, bundle.json", evaluated)
        role = "merged" if "merged" in report.scores else "candidate"
        metrics = sorted(report.scores[role].metrics.items()) if role in report.scores else []
        scores = ", ".join(f"{name} {metric.value:.4g} (n {metric.n:,})" for name, metric in metrics[:MAX_METRICS])
        more = f" and {len(metrics) - MAX_METRICS} more" if len(metrics) > MAX_METRICS else ""
        self._state("scores", f"{scores}{more}" or "none", model_store.EVALUATION)
        self._check_verdict(verdict, bundle)
        for result in verdict.reasons:
            self._state(f"rule {result.rule}", f"{result.outcome}: {result.text}", model_store.VERDICT)
        with self._report_damage("test set"):
            self._check_test_set(verdict)
        self._judge_again(verdict, bundle, report)

    def _check_verdict(self, verdict: Verdict, bundle: ModelBundle) -> None:
        judged = {"bundle.json": bundle.model_digest, model_store.VERDICT: verdict.model_digest}
        shown = (bundle.verdict or "")[:SHORT]
        self._compare("verdict", f"{verdict.decision}, SHA-256 {shown}", "verdict.json, bundle.json", judged)
        if self.origin is None:
            return
        line = self._describe_line(self.origin)
        values: dict[str, object] = {line: self.origin.decision, model_store.VERDICT: verdict.decision}
        self._compare("decision", f"{verdict.decision}, also in the ledger", line, values)
        before = self._entries_before(self.origin)
        opponent = None if self.origin.previous_version is None or not before else before[-1].model_digest
        text = f"version {self.origin.previous_version}" if opponent else "no champion before"
        if verdict.is_champion:
            self._state("compared with", "itself: it was champion already", model_store.VERDICT)
        elif self.origin.previous_version is not None and not before:
            self._unverified("compared with", text, "the ledger does not have the champion before it")
        else:
            self._compare("compared with", text, line, {line: opponent, model_store.VERDICT: verdict.champion_digest})

    def _entries_before(self, entry: Promotion) -> list[Promotion]:
        return self.entries[: self.entries.index(entry)]

    def _check_test_set(self, verdict: Verdict) -> None:
        """Compare the test set and the number of its uses with experiments/test_set_uses.jsonl."""
        path, digest = self.layout.test_set_uses, verdict.test_set_digest
        shown = self._show(path)
        uses = test_sets.read_uses_of(self.layout, digest)
        own = [use for use in uses if use.model == verdict.adapter_digest]
        known = test_sets.read_test_set(self.layout, digest)
        if known is None:
            self._unverified("test set", digest[:SHORT], f"{shown}: does not have its rows")
        else:
            count = sum(map(len, known.ids().values()))
            self._verified("test set", f"{digest[:SHORT]}, the digest of {count:,} ids", shown)
        limit = f" (limit {verdict.max_test_set_uses})" if verdict.max_test_set_uses else ""
        text = f"{units.format_count(verdict.test_set_uses, 'model')} at the verdict{limit}"
        comparison = test_sets.compare_uses(self.layout, digest, verdict.adapter_digest)
        now = comparison.known
        if (problem := comparison.describe_missing_lines(self.layout)) is not None:
            self._contradicted("uses of the test set", text, problem)
        elif not own:
            self._unverified("uses of the test set", text, f"{shown}: has no line about this model")
        elif now < verdict.test_set_uses:
            self._contradicted("uses of the test set", text, f"{shown}: has only {now} now; lines were removed")
        else:
            self._verified("uses of the test set", f"{text}, {now} now", shown)
        for note in verdict.notes:
            self._state("note", note, model_store.VERDICT)
        if verdict.earlier_decisions:
            earlier = f"{', '.join(verdict.earlier_decisions)}, under other rules"
            self._state("earlier decisions", earlier, model_store.VERDICT)
        if verdict.alpha_share is not None:
            looks = units.format_count(len([use for use in own if use.decision]), "recorded look")
            text = f"sequential test at {verdict.alpha_share:.3g} of its level, {looks}"
            rows = f"{verdict.remaining_rows:,} test rows were not scored"
            self._state("sequential", f"{text}; {rows}", model_store.VERDICT)

    def _judge_again(self, verdict: Verdict, bundle: ModelBundle, report: EvaluationReport) -> None:
        """Decide the verdict again from the scores of single rows, with the rules and the champion of that time."""
        name, layout = "judged again", self.layout
        evaluation = layout.eval_report
        if not evaluation.is_file():
            self._unverified(name, verdict.decision, f"{self._show(layout.evaluate)} is not on this machine")
            return
        if not (findings := self._verify(layout.evaluate)):
            return
        [finding] = findings
        if finding.status != "ok":
            self._add_finding(finding, "evaluation, rows", "")
            return
        if digests.hash_file(evaluation) != bundle.evaluation:
            self._unverified(name, verdict.decision, f"{self._show(layout.evaluate)} has another evaluation now")
            return
        self._add_finding(finding, "evaluation, rows", "the scores of single rows, every byte")
        gate = self._find_rules(verdict, bundle.lineage)
        if gate is None:
            reason = f"the rules of that time ({verdict.rules[:SHORT]}) are not in params.yaml any more"
            self._unverified(name, verdict.decision, reason)
            return
        try:
            tasks = fingerprint_tasks(self.settings.evaluate.harness.tasks, layout.root, layout.tasks)
            evidence = read_evidence(layout, self.settings.model_copy(update={"gate": gate}), tasks)
        except RatchetError as error:
            kind = self._contradicted if isinstance(error, DamagedFileError) else self._unverified
            kind(name, verdict.decision, self._shorten_paths(str(error)))
            return
        then = ledger.replay_entries(self._entries_before(self.origin) if self.origin is not None else [])
        opponents = (then.champion, then.anchor, self.champion)
        past = dataclasses.replace(
            evidence,
            bundle=bundle,
            champion=ChampionFile(
                champion=_find_model(opponents, verdict.champion_digest),
                anchor=_find_model(opponents, verdict.anchor_digest),
            ),
            test_set_uses=verdict.test_set_uses,
            missing_uses_problem=None,
            earlier_decisions=verdict.earlier_decisions,
        )
        # Sets for model selection may have grown since the verdict, so the overlaps of the evaluation count, too.
        candidates = (past, dataclasses.replace(past, report=report))
        expected = _summarize(verdict)
        decisions = [decide_verdict(one, gate) for one in candidates]
        if expected in map(_summarize, decisions):
            text = f"{verdict.decision} follows again from the scores of single rows and the rules of that time"
            self._verified(name, text, f"{self._show(layout.evaluate)}, rules {verdict.rules[:SHORT]}")
        else:
            problem = f"the scores in {self._show(layout.evaluate)} give {decisions[0].decision}"
            self._contradicted(name, verdict.decision, f"{model_store.VERDICT}: {problem}, or other rules fail")

    def _find_rules(self, verdict: Verdict, lineage: ModelLineage | None) -> Gate | None:
        """Find the section gate with the digest in the verdict: in params.yaml, or as it was at the export."""
        candidates = [self.settings.gate]
        with suppress_invalid():
            candidates.append(Gate.model_validate(lineage.settings["gate"] if lineage else {}))
        return next((gate for gate in candidates if rules_digest(gate) == verdict.rules), None)

    # 5. Approvals.

    def check_approvals(self) -> None:
        """Verify the signed approvals in the model's folder, and compare them with those in the ledger."""
        self._section = "approvals"
        if self.origin is None:
            self._unverified("approvals", "unknown", f"{self._show(self.layout.promotions)}: has no line about it")
            return
        line, folder, recorded = (
            self._describe_line(self.origin),
            self._folder / approvals.FOLDER,
            self.origin.approvals,
        )
        if recorded is None:
            self._state_entry("approvals", "none were required (promote.approvals)", self.origin)
            return
        given = f"{len(recorded.approvers)} of {recorded.required} given"
        text = f"{given}, {recorded.missing} missing" if recorded.missing else given
        if not self._folder.is_dir():
            self._unverified("approvals", text, self._missing_folder)
            return
        values: dict[str, object] = {line: recorded.verdict_digest}
        if self.bundle is not None:
            values["bundle.json"] = self.bundle.verdict
        self._compare("approved verdict", recorded.verdict_digest, line, values)
        found: set[tuple[str, str, str]] = set()
        signed_by = ""
        with self._report_damage("approvals"):
            keyring = keys.read_keyring(self.layout.keyring)
            signed_by = signature.read_signature(self._folder, keyring).signer
            for approval in approvals.verify_approvals(self._folder, keyring, self.origin.time):
                who = f"{approval.actor} ({approval.signer[: keys.SHOWN_DIGITS]}) on {approval.time}"
                if approval.problem is None and approval.verdict_digest != recorded.verdict_digest:
                    self._contradicted("approval", who, f"{self._show(folder)}: is of another verdict")
                elif approval.problem is not None:
                    self._contradicted("approval", who, self._shorten_paths(approval.problem))
                else:
                    found.add((approval.signer, approval.actor, approval.time))
                    self._verified("approval", f"{who}, signed", self._show(folder))
        named = {(one.signer, one.actor, one.time) for one in recorded.approvers}
        for one in sorted(named ^ found):
            where = f"{self._show(folder)} has no valid file of it" if one in named else f"{line} does not have it"
            self._contradicted("approval", f"{one[1]} on {one[2]}", where)
        signers = [one.signer for one in recorded.approvers]
        is_short = approvals.count_missing(signers, None, recorded.required) > recorded.missing
        if is_short or (recorded.missing and not self.origin.forced):
            self._contradicted("approvals", text, f"{line}: more approvals are missing than it says")
        elif approvals.count_missing(signers, signed_by, recorded.required) > recorded.missing:
            reason = "the only person who approved has signed the folder since, such as to repair it"
            self._unverified("approvals", text, reason)
        else:
            self._state_entry("approvals", text, self.origin)

    # 6. Promotion.

    def check_promotion(self) -> None:
        """State who promoted the model, and check the alias."""
        self._section = "promotion"
        for entry in self.entries:
            if entry.model_digest != self.champion.model_digest:
                continue
            why = f": {entry.reason}" if entry.reason else ""
            verdict = f", verdict {entry.decision}" if entry.decision else ""
            mark = ", FORCED" if entry.forced else ""
            anchor = ", became the anchor" if entry.is_anchor else ""
            text = f"{entry.action} by {entry.actor} on {entry.time}{verdict}{mark}{anchor}{why}"
            self._state_entry(entry.action, text, entry)
        if self.layout.promotion_intent.exists():
            reason = f"{self._show(self.layout.promotion_intent)}: `ratchet promotions` completes or drops it"
            self._unverified("interrupted", "a promotion or rollback was interrupted", reason)
        self._check_registry()

    def _check_registry(self) -> None:
        """Compare alias and registered version with champion file and ledger."""
        name, where = "alias and version", self.registry.where
        if not self.registry.exists:
            self._unverified(name, "not compared", "this checkout has no registry")
            return
        try:
            registered = self.registry.version(self.champion.version)
            file = self.file
            if self.registry.shared is not None and self.entries:
                file = ChampionFile(champion=ledger.champion_of(self.entries[-1], self.entries))
            if file is None:
                self._unverified(name, "not compared", f"{self._show(self.layout.champion)} cannot be read")
                return
            alias = check_alias(self.layout, self.registry, file, target=None)
        except TrackingError as error:
            self._unverified(name, "not compared", str(error))
            return
        except ChampionError as error:
            self._contradicted(name, "differ", self._shorten_paths(str(error)))
            return
        found = registered.model_digest if registered is not None else "no such version"
        text = f"the alias names version {alias}; version {self.champion.version} has this model"
        where = where if self.registry.server is not None else self._show(self.layout.mlflow_database)
        self._compare(name, text, where, {"the ledger": self.champion.model_digest, where: found})

    # 7. Deployment.

    def check_deployments(self, directories: Sequence[Path]) -> None:
        """Check the releases of the version in deployment directories, and state who deployed them."""
        self._section = "deployment"
        recorded: list[releases.RecordedDeployment] = []
        with self._report_damage("list of deployments"):
            recorded = releases.read_recorded_deployments(self.layout)
        own = [one for one in recorded if one.deployment.model_digest == self.champion.model_digest]
        checked = [path.resolve() for path in directories]
        for one in own:
            if one.host == socket.gethostname() and (one.directory / releases.OWNER).is_file():
                checked.append(one.directory)
            self._describe_deployment(one)
        for root in dict.fromkeys(checked):
            self._check_deployment(root)
        if not own and not checked:
            reason = f"{self._show(self.layout.deployments)} names none; name a directory with --release DIR"
            self._unverified("deployments", "none known", reason)

    def _describe_deployment(self, recorded: releases.RecordedDeployment) -> None:
        """State a line of the project's list, which is in the history of its directory, too, if that is here."""
        entry, file, root = recorded.deployment, self._show(self.layout.deployments), recorded.directory
        damage = f"; the release before was damaged: {entry.damage}" if entry.damage else ""
        text = (
            f"{entry.artifact_name} to {root} on {recorded.host} by {entry.actor}, {entry.time}; smoke test: "
            f"{entry.smoke_test or 'not run'}{damage}"
        )
        path = releases.DeploymentDirectory(root).history_path
        with self._report_damage(entry.action, text):
            history = releases.DeploymentDirectory(root).read_history() if recorded.host == socket.gethostname() else []
            if not history:
                self._unverified(entry.action, text, f"{file}: {root} is not on this machine")
            elif entry in history:
                self._verified(entry.action, text, f"{file}, {path}")
            elif history[0].time > entry.time:
                self._unverified(entry.action, text, f"{path} begins later: the directory was made again")
            else:
                self._contradicted(entry.action, text, f"{path}: does not have this line of {file}")

    def _check_deployment(self, root: Path) -> None:
        """Check every byte of the version's releases in a deployment directory, and their signature."""
        directory, current = releases.DeploymentDirectory(root), None
        with self._report_damage(f"{root}"):
            owner = releases.DeploymentOwner.load(root / releases.OWNER).model_name
            if owner != self.registry.model_name:
                self._unverified(f"{root}", "not compared", f"it serves another model, {owner}")
                return
            current = directory.linked_release(directory.current)
        prefix = f"{self.champion.version}-{self.champion.model_digest[:SHORT]}-"
        folders = sorted(path for path in directory.releases.glob(f"{prefix}*") if path.is_dir())
        for folder in folders:
            state = "current" if folder == current else "not current"
            for finding in self._verify(folder, self._contradicted):
                text = f"{finding.text}, each file is a signed one" if finding.kind == "signature" else "every byte"
                self._add_finding(finding, f"release, {state}", text)
            with suppress_invalid():
                named = releases.Release.load(folder / releases.RECORD)
                path = self._show(folder / releases.RECORD)
                values = {"the ledger": self.champion.version, path: named.version}
                self._compare("release, version", str(named.version), path, values)
        if not folders:
            self._unverified("release", "none of this version", f"{root}: never deployed there, or removed since")


@contextmanager
def suppress_invalid() -> Iterator[None]:
    """Ignore that a file is missing or cannot be parsed, if another fact reports it or the file is optional."""
    try:
        yield
    except (DamagedFileError, DataError, OSError, ValueError, KeyError, TypeError):
        return


def list_terms(entries: Sequence[Promotion], version: int) -> Iterator[tuple[Promotion, Promotion | None]]:
    """Yield each term of a version as champion: the entry that began it, and the entry that ended it, if any."""
    begin: Promotion | None = None
    for entry in entries:
        if begin is not None and entry.version != version:
            yield begin, entry
            begin = None
        elif begin is None and entry.version == version:
            begin = entry
    if begin is not None:
        yield begin, None


def _find_differences(file: Record, other: Record) -> list[str]:
    """Return the names of the fields in which two records of the same class differ."""
    return [name for name in type(file).model_fields if getattr(file, name) != getattr(other, name)]


def _is_approval(finding: VerifyFinding) -> bool:
    """Return whether a finding is about the approvals in a model's folder."""
    return finding.kind == "approval" or finding.path.name == approvals.FOLDER


def _summarize(verdict: Verdict) -> tuple[Any, ...]:
    """Return what must be equal in a verdict that is decided again; the texts may have changed."""
    return verdict.decision, [(reason.rule, reason.metric, reason.outcome) for reason in verdict.reasons]


def _find_model(champions: Iterable[Champion | None], model_digest: str | None) -> Champion | None:
    return next((one for one in champions if one is not None and one.model_digest == model_digest), None)


def _list_files(folder: Path) -> list[str]:
    """Return the names of the files in a folder; empty if there is none. Verification reports folders in it."""
    return sorted(path.name for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []


def _shorten(value: object) -> str:
    text = str(value)
    return text[:SHORT] if len(text) == 64 else text
