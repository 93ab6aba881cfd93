"""The command line: the flags of each command, its call and its output."""
