"""One module for each DVC stage and each command. Its function takes a project, does the work and returns a record."""
