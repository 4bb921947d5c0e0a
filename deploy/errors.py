"""Errors of the outside that are not answers to a request.

UserError     one clear line for the terminal; the command ends with status 1
"""

from __future__ import annotations


class UserError(Exception):
    """Something the person at the terminal can fix; the message is one line and says how."""


def one_line(error: BaseException) -> str:
    """An error's message without its line breaks."""
    return " ".join(str(error).split())
