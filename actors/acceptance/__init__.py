"""Acceptance: pure functions from row statistics and drafts to a verdict."""
