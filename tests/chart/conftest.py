"""The chart's tests run with `make chart`, which installs Helm's library beside the product."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("helm_python") else ["test_*.py"]
