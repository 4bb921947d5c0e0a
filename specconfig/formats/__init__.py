"""Checkpoints whose config becomes another one before it is read."""
