"""A Serve config file as the `paceline` command takes it: read, overridden, checked."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from actors.memory import available_bytes
from deploy.errors import UserError, one_line
from specconfig.app_args import AppArgs
from specconfig.errors import ConfigError
from specconfig.readers import check_supported

DEFAULT_PORT: Final = 8000
# Ray's own processes, the Serve controller, proxy and ingress, and the engine's code.
_BASE_MIB: Final = 2500


@dataclass(frozen=True, slots=True)
class ServeFile:
    """A Serve config file, read and checked."""

    config: dict[str, Any]
    host: str
    port: int

    @property
    def url(self) -> str:
        """Where clients on this machine reach it."""
        prefix = str(self.config["applications"][0].get("route_prefix") or "/").rstrip("/")
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"http://{host}:{self.port}{prefix}"

    @property
    def app_names(self) -> list[str]:
        return [str(app.get("name", "default")) for app in self.config["applications"]]


def read_serve_file(
    path: str | Path,
    *,
    host: str | None = None,
    port: int | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> ServeFile:
    """Read `path`; `host`, `port` and `overrides` (args of every application) win over the file.

    Raises:
        UserError: The file cannot be read, is no Serve config, or holds settings that cannot work.
    """
    try:
        config = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"cannot read {path}: {one_line(error)}") from None
    apps = config.get("applications") if isinstance(config, dict) else None
    if not isinstance(apps, list) or not apps or not all(isinstance(app, dict) for app in apps):
        raise UserError(f"{path} is not a Serve config: it has no list of 'applications'")
    config = copy.deepcopy(config)
    for app in config["applications"]:
        app["args"] = {**(app.get("args") or {}), **(overrides or {})}
        try:
            args = AppArgs(**{str(key): value for key, value in app["args"].items()})
            check_supported(args.resolve())
        except ConfigError as error:
            raise UserError(f"{path}: {one_line(error)}") from None
        _check_memory(args)
    http = config.setdefault("http_options", {}) or {}
    config["http_options"] = http
    http["host"] = host or http.get("host") or "127.0.0.1"
    http["port"] = port or http.get("port") or DEFAULT_PORT
    return ServeFile(config, str(http["host"]), int(http["port"]))


def _check_memory(args: AppArgs) -> None:
    available = available_bytes()
    model = Path(args.model).expanduser()
    if available is None or not model.is_dir() or args.device == "cuda":
        return
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors")) // 2**20
    needed = _BASE_MIB + args.resolved_num_replicas * weights
    if needed * 2**20 > available:
        raise UserError(
            f"too little memory: serving {args.model} needs about {needed} MiB "
            f"({weights} MiB of weights), this machine has {available // 2**20} MiB free; "
            "close other programs or use a smaller model"
        )
