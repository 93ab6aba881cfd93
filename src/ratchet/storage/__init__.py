"""Files on disk: atomic writes, sealed directories, digests, locks, project layout."""
