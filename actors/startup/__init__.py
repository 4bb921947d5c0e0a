"""Putting an engine together: checks, sizing, processes; and keeping its draft alive."""
