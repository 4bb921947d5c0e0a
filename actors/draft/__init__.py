"""The draft side: drafters and the host of a separate draft model."""
