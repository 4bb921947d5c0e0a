"""One file per method family; each class says what its drafter needs, never how it works.

``base`` is what they share, ``resolution`` and ``draft_config`` are what their hooks work with.
"""
