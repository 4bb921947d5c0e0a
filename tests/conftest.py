"""What all tests share."""

from __future__ import annotations

import os
import secrets

# Ray reads its token once per process, so all private clusters of a test session share one. Set
# before anything imports Ray.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
