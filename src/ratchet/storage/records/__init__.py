"""Records: the JSON files that stages exchange; frozen, typed, versioned."""
