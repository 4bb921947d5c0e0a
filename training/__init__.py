"""Offline: train, convert and package drafters."""
