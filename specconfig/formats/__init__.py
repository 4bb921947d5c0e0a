"""Checkpoint formats that are not a plain Hugging Face config."""
