"""Who runs where, and how ranks agree."""
