"""Errors of the outside that are not answers to a request.

UserError     one clear line for the terminal; the command ends with status 1
"""

from __future__ import annotations


class UserError(Exception):
    """Something the person at the terminal can fix; the message is one line and says how."""
