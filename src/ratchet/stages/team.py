"""`ratchet team`: users, roles and quotas of the project's tenant on an MLflow server. Also the checks of quotas.

Quotas are checked by the commands that create runs and upload models. A server that cannot be asked stops no training.
"""

import threading
from dataclasses import dataclass

from ratchet.config.units import format_bytes, parse_bytes
from ratchet.errors import DOCUMENTATION, QuotaError, ReplicaError, SettingsError, TrackingError, first_line
from ratchet.runs.directory import RunPaths
from ratchet.runs.log import print_message
from ratchet.runs.replication.store import RunObjectNames
from ratchet.stages.project import Project
from ratchet.storage.records.base import Record
from ratchet.tracking.mlflow.client import MlflowTracker
from ratchet.tracking.mlflow.team import MAX_DIGITS, UNLIMITED, Quota, Role, TeamMember, Tenant, Usage

WAIT_S = 15.0
"""Longest wait for a slow server before a training begins without a check of its quota."""


class TeamReport(Record):
    """The project's tenant on an MLflow server."""

    server: str
    tenant: str | None
    """Workspace of the server; None: the server has no workspaces."""
    model_name: str
    members: tuple[TeamMember, ...]
    """Users with a role; only the own one for a user who is not an administrator."""
    quota_runs: int | None
    quota_bytes: int | None
    runs: int
    """Trainings that are not deleted, in all experiments of the tenant."""
    model_bytes: int
    """Files of promoted models of the tenant on the server."""
    replica_bytes: int
    """Objects of machine.replica."""
    created_user: str | None = None
    """A user that this command created."""


@dataclass(frozen=True)
class TeamOptions:
    """Changes of a tenant; by default none."""

    grant: str | None = None
    """User who gets `role`, in place of an earlier role."""
    role: Role | None = None
    revoke: str | None = None
    """User who loses every role."""
    quota_runs: str | None = None
    """Number of trainings, or `none`."""
    quota_disk: str | None = None
    """Size such as `200GB`, or `none`."""


def team(project: Project, options: TeamOptions = TeamOptions()) -> TeamReport:
    """Change users, roles and quotas of the tenant, as an administrator of the server, and return them.

    The first change creates the tenant: workspace, experiments and registered model. A repeated call changes nothing.

    Raises:
        SettingsError: runs are not logged to a server, the server has no users, or an option is not valid.
        PermissionRefusedError: the user is no administrator.
        TrackingError: the server cannot be used.
        ReplicaError: the project's replica cannot be read.
    """
    if (options.grant is None) != (options.role is None):
        raise SettingsError("--grant USER and --role ROLE belong together: give both or neither")
    tenant = Tenant.open(project.layout, project.settings)
    if tenant is None:
        raise SettingsError(
            "machine.tracking_uri: runs are logged to the project's own store, which has no users; set it, or "
            f"MLFLOW_TRACKING_URI, to a server with users ({DOCUMENTATION}, page teams)"
        )
    quota = _parse_quota(options)
    created_user = None
    if options.grant is not None and options.role is not None:
        created_user = options.grant if tenant.grant(options.grant, options.role) else None
    if options.revoke is not None:
        tenant.revoke(options.revoke)
    members = tenant.read_members()
    if quota:
        before = tenant.read_quota()
        tenant.write_quota(Quota(quota.get("runs", before.runs), quota.get("disk", before.disk_bytes)))
    limits, used = tenant.read_quota(), tenant.read_usage()
    return TeamReport(
        server=tenant.server, tenant=tenant.name, model_name=project.settings.promote.model_name,
        members=tuple(members), quota_runs=limits.runs,
        quota_bytes=limits.disk_bytes, runs=used.runs, model_bytes=used.model_bytes, replica_bytes=used.replica_bytes,
        created_user=created_user,
    )  # fmt: skip


def _parse_quota(options: TeamOptions) -> dict[str, int | None]:
    """Return the limits that the options change."""
    quota: dict[str, int | None] = {}
    if (text := options.quota_runs) is not None:
        if text != UNLIMITED and not (text.isdecimal() and len(text) <= MAX_DIGITS):
            raise SettingsError(f"--quota-runs: found {text[:40]!r}; expected a number of trainings, or {UNLIMITED}")
        quota["runs"] = None if text == UNLIMITED else int(text)
    if (text := options.quota_disk) is not None:
        quota["disk"] = None if text == UNLIMITED else parse_bytes(text, "--quota-disk")
    return quota


def require_run_quota(project: Project, run_id: str | None = None, new_runs: int = 1) -> None:
    """Require room for new runs in the quota of the tenant. A run that exists is not new, wherever it is.

    Without a server there is no quota. If the server or the replica cannot be read, a line says that the quota was not
    checked.

    Raises:
        QuotaError: there is no room; nothing was created.
        SettingsError: the address of the server is not valid.
    """
    layout, settings = project.layout, project.settings
    tenant = Tenant.open(layout, settings)
    if tenant is None or (run_id is not None and RunPaths(layout.runs / run_id).journal.exists()):
        return
    if (found := _read_in_time(project, tenant, run_id)) is None:
        return
    quota, used = found
    if quota.runs is not None and used.runs + new_runs > quota.runs:
        what = "one more" if new_runs == 1 else f"{new_runs:,} more"
        raise QuotaError(
            f"{_name(tenant)} has {used.runs:,} of {quota.runs:,} trainings on {tenant.server}, and this needs {what}. "
            "An administrator deletes runs on MLflow's page of the experiment, or raises the quota: `ratchet team "
            "--quota-runs N`. No run was created"
        )
    if quota.disk_bytes is not None and used.disk_bytes >= quota.disk_bytes:
        raise QuotaError(_describe_disk(tenant, quota, used.model_bytes, used.replica_bytes))


def _read_in_time(project: Project, tenant: Tenant, run_id: str | None) -> tuple[Quota, Usage] | None:
    """Return quota and usage of the tenant. None: there is no quota, the run is not new, or they cannot be read within
    WAIT_S, which a line reports."""
    results: list[tuple[Quota, Usage] | None] = []
    failures: list[Exception] = []

    def read() -> None:
        try:
            quota = tenant.read_quota()
            is_limited = quota != Quota() and not (run_id is not None and _is_known(project, tenant, run_id))
            results.append((quota, tenant.read_usage()) if is_limited else None)
        except Exception as error:  # the caller's thread raises or prints it
            failures.append(error)

    thread = threading.Thread(target=read, name="quota", daemon=True)
    thread.start()
    thread.join(WAIT_S)
    if results:
        return results[0]
    error = failures[0] if failures else TrackingError(f"{tenant.server} has not answered within {WAIT_S:g} s")
    if not isinstance(error, TrackingError | ReplicaError):
        raise error
    print_message(f"the quota was not checked: {first_line(error)}")
    return None


def require_model_quota(project: Project, model_bytes: int) -> None:
    """Require room for the files of a promoted model in the quota of the tenant. No effect without a server.

    Raises:
        QuotaError: there is no room; nothing was uploaded.
        TrackingError, ReplicaError: the server or the replica cannot be read.
    """
    tenant = Tenant.open(project.layout, project.settings)
    if tenant is None or (quota := tenant.read_quota()).disk_bytes is None:
        return
    used = tenant.read_usage()
    if used.disk_bytes + model_bytes > quota.disk_bytes:
        raise QuotaError(_describe_disk(tenant, quota, used.model_bytes, used.replica_bytes, model_bytes))


def _is_known(project: Project, tenant: Tenant, run_id: str) -> bool:
    """Return whether another machine has begun the run."""
    if MlflowTracker.open(project.layout, project.settings).find(run_id) is not None:
        return True
    return any(name.startswith(f"{RunObjectNames(run_id).root}/") for name in tenant.read_replica())


def _name(tenant: Tenant) -> str:
    return f"quota: tenant {tenant.name}" if tenant.name else "quota: this tenant"


def _describe_disk(
    tenant: Tenant, quota: Quota, model_bytes: int, replica_bytes: int, added_bytes: int | None = None
) -> str:
    used, limit = format_bytes(model_bytes + replica_bytes), format_bytes(quota.disk_bytes or 0)
    needed = "" if added_bytes is None else f", and this model needs {format_bytes(added_bytes)}"
    return (
        f"{_name(tenant)} uses {used} of {limit} ({format_bytes(model_bytes)} in promoted models on {tenant.server}, "
        f"{format_bytes(replica_bytes)} in machine.replica){needed}. Remove runs from the replica with `ratchet reset "
        "RUN --replica`, or ask an administrator to delete versions or to raise the quota: `ratchet team --quota-disk "
        "SIZE`. Nothing was created"
    )
