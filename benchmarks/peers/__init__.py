"""Paceline beside other systems: one machine, one model, the same prompts, in alternation."""
