"""One module for each DVC stage and each command: it takes a project, does the work and returns what it found."""
