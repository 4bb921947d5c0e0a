"""One file per method family; each class says what its drafter needs, never how it works."""
