"""A run: its directory, journal, supervisor, restart policy, heartbeat and callbacks."""
