"""The kernels of linear.c by ctypes."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path

from actors.native import build

PANEL = 16  # P of linear.c

_P, _I = ctypes.c_void_p, ctypes.c_int64


@lru_cache(maxsize=1)
def load() -> ctypes.CDLL | None:
    """The compiled kernels, built on first use, or None when this machine cannot build them."""
    lib = build.load_library(Path(__file__).with_name("linear.c"), (), "linear layers")
    if lib is None:
        return None
    lib.linear.argtypes = [_P, _I, _P, _I, _I, _P, _I, _I, _P, _I, ctypes.c_int]
    lib.linear.restype = None
    lib.look_up.argtypes = [_P, _I, _I, _I, _P, _I, _P]
    lib.look_up.restype = ctypes.c_int
    lib.run_layers.argtypes = [_I, *[_P] * 6, *[_I] * 4, _P, ctypes.c_int]
    lib.run_layers.restype = ctypes.c_int
    return lib
