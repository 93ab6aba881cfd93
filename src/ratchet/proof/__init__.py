"""What was merged and exported is run, and compared with what was trained."""
