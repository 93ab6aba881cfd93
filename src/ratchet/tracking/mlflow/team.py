"""Roles and quotas of a tenant on an MLflow server with users (`mlflow server --app-name basic-auth`).

A tenant is a workspace of the server (`--enable-workspaces`, MLFLOW_WORKSPACE); a server without workspaces is one
tenant. Each of Ratchet's roles is a role of MLflow in the workspace. A role includes those before it:

    viewer      reads every experiment and registered model of the workspace
    trainer     logs runs to the projects' experiments, and replaces traces of answers
    promoter    changes the projects' registered models, and their experiments with ledger and files

No role has a permission on the workspace itself, because that would let its users create experiments, list users, and
list the root of the artifacts. So an administrator creates a project's experiments and registered model.

Quotas are tags of an experiment that every role reads and none changes.

MLflow's own client of users and roles (`mlflow.server.auth.client`, 3.17) is not used: importing it loads the server
with its database and Flask-WTF, and it has no call that lists users.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from ratchet.config.mlflow_environment import resolve_addresses
from ratchet.config.settings import Settings
from ratchet.errors import DOCUMENTATION, PermissionRefusedError, SettingsError
from ratchet.runs.replication.remote_status import resolve_replica
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import Record
from ratchet.tracking.mlflow import experiments
from ratchet.tracking.mlflow.client import MlflowTracker
from ratchet.tracking.mlflow.experiments import (
    FORBIDDEN,
    RUN_TAG,
    WORKSPACE,
    MlflowStore,
    find_http_status,
    open_experiment,
)
from ratchet.tracking.mlflow.model_files import BYTES_TAG
from ratchet.tracking.mlflow.shared_ledger import LEDGER_SUFFIX, SharedLedger

Role = Literal["viewer", "trainer", "promoter"]
ROLES: tuple[Role, ...] = get_args(Role)
ROLE_PREFIX = "ratchet."
"""Prefix of the names of Ratchet's roles in MLflow. Other roles are left unchanged."""
PASSWORD = "RATCHET_USER_PASSWORD"  # noqa: S105 (the name of a variable)
"""Environment variable with the password of a user who is created."""

QUOTA_EXPERIMENT = "ratchet.quota"
RUNS_TAG, DISK_TAG = "ratchet.quota_runs", "ratchet.quota_bytes"
UNLIMITED = "none"
MAX_DIGITS = 18
"""Number of digits of a size or a limit; a longer text is not a number that was meant."""
DEFAULT_WORKSPACE = "default"
"""The workspace of objects without a workspace. MLflow keeps its artifacts at the root, above those of all others."""
NOT_FOUND, MISSING, EXISTING = 404, "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS"


@dataclass(frozen=True)
class Quota:
    """Limits of a tenant. None: there is no limit."""

    runs: int | None = None
    disk_bytes: int | None = None


@dataclass(frozen=True)
class Usage:
    """Runs and bytes that count against the quota of a tenant."""

    runs: int
    """Trainings that are not deleted, in all experiments of the tenant."""
    model_bytes: int
    """Files of promoted models on the server, of all projects of the tenant."""
    replica_bytes: int
    """Objects of `machine.replica`."""

    @property
    def disk_bytes(self) -> int:
        return self.model_bytes + self.replica_bytes


class TeamMember(Record):
    """A user with one of Ratchet's roles."""

    user: str
    role: Role
    is_administrator: bool
    """Whether the user is an administrator of the server, who may do everything."""


class Tenant:
    """The tenant of a project: its users, roles and quota. Every method raises TrackingError if the server cannot be
    used, and PermissionRefusedError if the user may not do it."""

    def __init__(self, layout: ProjectLayout, settings: Settings, server: str) -> None:
        self._layout, self._settings, self.server = layout, settings, server
        self._store = MlflowStore(layout, server, needed_roles="only an administrator changes roles and quotas")

    @classmethod
    def open(cls, layout: ProjectLayout, settings: Settings) -> "Tenant | None":
        """Open the tenant of the project; None if runs are not logged to a server."""
        server = resolve_addresses(settings, layout.mlflow_database).tracking
        return None if server is None else cls(layout, settings, server)

    @property
    def name(self) -> str | None:
        """Name of the workspace; None on a server without workspaces."""
        return os.environ.get(WORKSPACE) or None

    # ------------------------------------------------------------------------------------------------ users and roles

    def read_members(self) -> list[TeamMember]:
        """Return the users with a role, by name. Users who are not administrators see only themselves.

        Raises:
            SettingsError: the server has no users.
            PermissionRefusedError: the user has no role here, and is no administrator.
        """
        with self._store.connected():
            current = self._read_current_user()
            if current["is_admin"]:
                users = self._call("GET", "users/list", version=2)["users"]
            else:
                found = self._call("GET", "users/roles/list", username=current["username"])
                users = [{**current, "roles": found["roles"]}]
        workspace = self.name or DEFAULT_WORKSPACE
        members = [
            TeamMember(user=user["username"], role=role, is_administrator=user["is_admin"])
            for user in users
            for role in ROLES
            if any((r["workspace"], r["name"]) == (workspace, ROLE_PREFIX + role) for r in user["roles"])
        ]
        if not members and not current["is_admin"]:
            where = f"tenant {self.name} of {self.server}" if self.name else self.server
            raise PermissionRefusedError(f"user {current['username']} has no role in {where}")
        return sorted(members, key=lambda member: member.user)

    def grant(self, user: str, role: Role) -> bool:
        """Give a user one role. First create what is missing: workspace, experiments, registered model, roles, user.

        Every step may be repeated. Return whether the user was created.

        Raises:
            SettingsError: registered models are elsewhere; the server has no users, or lets users do more than their
                role; or there is no password for a new user.
        """
        addresses = resolve_addresses(self._settings, self._layout.mlflow_database)
        if addresses.registry != self.server:
            raise SettingsError(
                f"{addresses.registry_source}: registered models are not on {self.server}, and roles are of one "
                "server; unset it"
            )
        with self._store.connected() as client:
            self._read_current_user()
            self._require_workspace(client)
            train_id, ledger_id = self._create_objects(client)
            roles = self._ensure_roles(train_id, ledger_id)
            is_new = self._ensure_user(user)
            for other in self._list_roles_of(user):
                if other["name"] != ROLE_PREFIX + role:
                    self._call("DELETE", "roles/unassign", username=user, role_id=other["id"])
            self._ignore(EXISTING, partial(self._call, "POST", "roles/assign", username=user, role_id=roles[role]))
            try:
                self._require_effect(user, role, ledger_id)
            except SettingsError:
                self._call("DELETE", "roles/unassign", username=user, role_id=roles[role])
                raise
            return is_new

    def revoke(self, user: str) -> None:
        """Take every role of Ratchet from a user.

        Raises:
            SettingsError: the server has no users, or not this one.
        """
        with self._store.connected():
            self._read_current_user()
            if not self._has_user(user):
                raise SettingsError(f"--revoke {user}: {self.server} has no user of this name")
            for role in self._list_roles_of(user):
                self._call("DELETE", "roles/unassign", username=user, role_id=role["id"])

    def _read_current_user(self) -> dict[str, Any]:
        from mlflow.exceptions import MlflowException
        from mlflow.utils.workspace_context import WorkspaceContext

        try:
            with WorkspaceContext(None):  # the server refuses requests that name a workspace which does not exist
                return dict(self._call("GET", "users/current", version=2)["user"])
        except MlflowException as error:
            if find_http_status(error) != NOT_FOUND:
                raise
            raise SettingsError(
                f"{self.server} has no users and roles; start it with `mlflow server --app-name basic-auth` "
                f"({DOCUMENTATION}, page teams)"
            ) from None

    def _require_workspace(self, client: Any) -> None:
        """Create the workspace if it does not exist. Raises SettingsError if the server needs one and none is named."""
        from mlflow.exceptions import MlflowException
        from mlflow.utils.workspace_context import WorkspaceContext

        if self.name is None or self.name == DEFAULT_WORKSPACE:
            if self._call("GET", "server-info").get("workspaces_enabled"):
                raise SettingsError(
                    f"{self.server} has workspaces: set {WORKSPACE} to the name of the tenant, which is not "
                    f"{DEFAULT_WORKSPACE} ({DOCUMENTATION}, page teams)"
                )
            return
        name = self.name
        with WorkspaceContext(None):
            try:
                client.get_workspace(name)
            except MlflowException as error:
                if error.error_code != MISSING:
                    raise
                self._ignore(EXISTING, partial(client.create_workspace, name))

    def _create_objects(self, client: Any) -> tuple[str, str]:
        """Create the project's experiments and registered model. Return the ids of the experiments with its runs and
        with its ledger."""
        tracker = MlflowTracker.open(self._layout, self._settings)
        experiments.write_views(tracker)
        ledger = SharedLedger(self._store, self._settings.promote.model_name)
        ledger.open_run(client)
        open_experiment(client, QUOTA_EXPERIMENT)
        return tracker.id, open_experiment(client, ledger.experiment_name)

    def _ensure_roles(self, train_id: str, ledger_id: str) -> dict[Role, int]:
        """Create roles, or add the permissions that they lack. Return their ids."""
        workspace, ids = self.name or DEFAULT_WORKSPACE, dict[Role, int]()
        known = {role["name"]: role for role in self._call("GET", "roles/list", workspace=workspace)["roles"]}
        for role in ROLES:
            name = ROLE_PREFIX + role
            found = known.get(name) or self._call("POST", "roles/create", workspace=workspace, name=name)["role"]
            ids[role] = int(found["id"])
            present = {(p["resource_type"], p["resource_pattern"]): p for p in found["permissions"]}
            for (kind, pattern), permission in self._permissions(role, train_id, ledger_id).items():
                if (old := present.get((kind, pattern))) is None:
                    self._call(
                        "POST", "roles/permissions/add", role_id=found["id"], resource_type=kind,
                        resource_pattern=pattern, permission=permission,
                    )  # fmt: skip
                elif old["permission"] != permission:
                    change = {"role_permission_id": old["id"], "permission": permission}
                    self._call("PATCH", "roles/permissions/update", **change)
        return ids

    def _permissions(self, role: Role, train_id: str, ledger_id: str) -> dict[tuple[str, str], str]:
        """Return MLflow's permissions of a role, by type and name of the object."""
        permissions = {("experiment", "*"): "READ", ("registered_model", "*"): "READ"}
        if role != "viewer":
            permissions[("experiment", train_id)] = "EDIT"
            permissions[("trace", "*")] = "MANAGE"  # an evaluation replaces the traces of the one before
        if role == "promoter":
            permissions[("experiment", ledger_id)] = "EDIT"
            permissions[("registered_model", self._settings.promote.model_name)] = "EDIT"
        return permissions

    def _ensure_user(self, user: str) -> bool:
        """Create a user who does not exist, with the password in the environment. Return whether it was created."""
        if self._has_user(user):
            return False
        if not (password := os.environ.get(PASSWORD)):
            raise SettingsError(f"{self.server} has no user {user}: set {PASSWORD} to the password of the new user")
        self._ignore(EXISTING, partial(self._call, "POST", "users/create", version=2, username=user, password=password))
        return True

    def _has_user(self, user: str) -> bool:
        return self._ignore(MISSING, partial(self._call, "GET", "users/get", version=2, username=user)) is not None

    def _list_roles_of(self, user: str) -> Iterator[dict[str, Any]]:
        """Yield Ratchet's roles of a user in this workspace."""
        workspace, names = self.name or DEFAULT_WORKSPACE, {ROLE_PREFIX + role for role in ROLES}
        for role in self._call("GET", "users/roles/list", username=user)["roles"]:
            if role["workspace"] == workspace and role["name"] in names:
                yield role

    def _require_effect(self, user: str, role: Role, ledger_id: str) -> None:
        """Raise SettingsError if the user would have other permissions than the role."""
        allowed = {
            ("experiment", ledger_id): "EDIT" if role == "promoter" else "READ",
            ("prompt", "*"): "NO_PERMISSIONS",
        }
        for (kind, name), expected in allowed.items():
            answer = self._call(
                "GET", "users/permissions/get", username=user, resource_type=kind, resource_id=name
            )  # fmt: skip
            if answer["permission"] != expected:
                raise SettingsError(
                    f"{user} would have {answer['permission']} on {kind} {name}; role {role} has {expected}: "
                    "set default_permission = NO_PERMISSIONS in the server's configuration of basic-auth, and check "
                    f"the other roles of {user} on MLflow's page of users ({DOCUMENTATION}, page "
                    "teams). The role was not given"
                )

    # --------------------------------------------------------------------------------------------------------- quotas

    def read_quota(self) -> Quota:
        """Return the quota of the tenant."""
        from mlflow.exceptions import MlflowException

        with self._store.connected() as client:
            try:
                found = client.get_experiment_by_name(QUOTA_EXPERIMENT)
            except MlflowException as error:
                if find_http_status(error) == FORBIDDEN:  # a user without a role in a tenant has no quota either
                    return Quota()
                raise
            tags = {} if found is None else found.tags
        runs, disk_bytes = (tags.get(name, UNLIMITED) for name in (RUNS_TAG, DISK_TAG))
        return Quota(
            runs=int(runs) if runs.isdecimal() else None, disk_bytes=int(disk_bytes) if disk_bytes.isdecimal() else None
        )

    def write_quota(self, quota: Quota) -> None:
        """Replace the quota of the tenant."""
        with self._store.connected() as client:
            self._require_workspace(client)
            experiment_id = open_experiment(client, QUOTA_EXPERIMENT)
            for name, value in ((RUNS_TAG, quota.runs), (DISK_TAG, quota.disk_bytes)):
                client.set_experiment_tag(experiment_id, name, UNLIMITED if value is None else str(value))

    def read_usage(self) -> Usage:
        """Count runs, files of promoted models, and the objects of the project's replica.

        Raises:
            SettingsError, ReplicaError: the replica cannot be read.
        """
        with self._store.connected() as client:
            names = {e.experiment_id: e.name for e in _read_pages(client.search_experiments)}
            runs = sum(1 for _ in _read_pages(partial(client.search_runs, list(names), f"tags.`{RUN_TAG}` != ''")))
            ledgers = [number for number, name in names.items() if name.endswith(LEDGER_SUFFIX)]
            models = _read_pages(partial(client.search_logged_models, ledgers)) if ledgers else ()
            sizes = (model.tags.get(BYTES_TAG, "") for model in models)  # a promoter may have changed them
            model_bytes = sum(int(size) for size in sizes if size.isdecimal() and len(size) <= MAX_DIGITS)
        return Usage(runs, model_bytes, sum(self.read_replica().values()))

    def read_replica(self) -> dict[str, int]:
        """Return the objects in the project's replica with their sizes in bytes; empty without a replica.

        Raises:
            SettingsError, ReplicaError: the replica cannot be read.
        """
        if self._settings.machine.replica is None:
            return {}
        return resolve_replica(self._settings.machine, True, None)[0].list("runs", strict=True)

    # --------------------------------------------------------------------------------------------------------- requests

    def _call(self, method: str, path: str, version: int = 3, **arguments: Any) -> dict[str, Any]:
        """Call MLflow's REST interface of users and roles, with MLflow's own addresses and credentials."""
        from mlflow.utils.credentials import get_default_host_creds
        from mlflow.utils.rest_utils import http_request, verify_rest_response

        endpoint = f"/api/{version}.0/mlflow/{path}"
        content = {"params" if method == "GET" else "json": arguments} if arguments else {}
        response = http_request(get_default_host_creds(self.server), endpoint, method, **content)
        return dict(verify_rest_response(response, endpoint).json())

    def _ignore(self, code: str, call: Callable[[], Any]) -> Any:
        """Make a call. Return None if MLflow refuses it with this code."""
        from mlflow.exceptions import MlflowException

        try:
            return call()
        except MlflowException as error:
            if error.error_code != code:
                raise
            return None


def _read_pages(search: Callable[..., Any]) -> Iterator[Any]:
    """Yield the results of all pages of a search."""
    token = None
    while True:
        page = search(page_token=token)
        yield from page
        token = page.token
        if not token:
            return
