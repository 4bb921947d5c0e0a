"""How much memory this process may still take."""

from __future__ import annotations

from pathlib import Path


def available_bytes() -> int | None:
    """Memory that can be used without swapping, host's and container's; None where nobody says."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    found += _cgroup_free_bytes()
    return min(found, default=None)


def _cgroup_free_bytes() -> list[int]:
    """Room left under a container's memory limit: /proc/meminfo shows the host's memory."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        used = (root / "memory.current").read_text().strip()
        stats = (root / "memory.stat").read_text().split()
    except OSError:
        return []
    if limit == "max":
        return []
    # Page cache counts as used but is given back under pressure.
    values = dict(zip(stats[::2], stats[1::2], strict=False))
    cache = int(values.get("inactive_file", 0)) + int(values.get("active_file", 0))
    return [max(0, int(limit) - int(used) + cache)]
