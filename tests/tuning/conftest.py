"""Both storages of studies, for every test of this folder that is about either."""

from study_storages import storage, url  # noqa: F401 (fixtures)
