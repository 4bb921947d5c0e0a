"""Measurements. Nothing imports this package; nothing here is a test."""
