"""Replicas of runs in object storage or a shared directory, and the lease that decides which machine may write."""
