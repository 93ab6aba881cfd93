"""The command line: flags, one call for each command, and what it prints."""
