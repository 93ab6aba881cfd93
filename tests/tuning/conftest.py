"""Fixtures: both storages of studies, for all tests of this folder that use one."""

from study_storages import storage, url  # noqa: F401 (fixtures)
