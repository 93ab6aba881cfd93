"""A copy of a run in object storage or in another folder, and the lease that decides who may write."""
