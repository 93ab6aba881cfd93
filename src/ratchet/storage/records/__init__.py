"""What stages hand to each other, as JSON: frozen, typed, versioned."""
