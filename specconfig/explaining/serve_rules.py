"""What Ray Serve, its deploy step or our builder would refuse or drop in a Serve config file.

These rules need the file only; `deployment_rules` also needs the plan of the application.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from specconfig.errors import ConfigError, nearest, unknown_key
from specconfig.explaining.serve_schema import Application, File
from specconfig.explaining.yaml_lines import Path

BUILDER = "deploy.app:build"
"""import_path whose args we understand."""

_PROTOCOLS = ("http", "https", "s3", "gs", "azure", "abfss", "file", "gcs", "local")


@dataclass(frozen=True)
class Finding:
    """One problem and where it is."""

    path: Path
    error: ConfigError


def finding(path: Path, value: object, allowed: str, fix: str) -> Finding:
    """A value at `path` that cannot work, with what would and what to do."""
    return Finding(path, ConfigError(_dotted(path), value, allowed, fix))


def _dotted(path: Path) -> str:
    return ".".join(str(part) for part in path)


def check_file(data: Mapping[str, Any]) -> list[Finding]:
    """Everything wrong with the file that can be seen without a plan."""
    return [*_schema(data), *_names(data), *_applications(data)]


# --- keys and types ---------------------------------------------------------------------------


def _schema(data: Mapping[str, Any]) -> Iterator[Finding]:
    try:
        File.model_validate(data)
    except ValidationError as error:
        seen: set[Path] = set()
        for one in error.errors(include_url=False):
            path, model = _locate(data, one["loc"])
            if path in seen:  # a union complains once per member
                continue
            seen.add(path)
            yield _of_schema(path, model, one)


def _of_schema(path: Path, model: type[BaseModel], error: Any) -> Finding:
    key, given = str(path[-1]), error.get("input")
    if error["type"] == "extra_forbidden":
        if model is Application and key in ("host", "port"):
            return finding(path, given, "not here", f"write http_options: {{{key}: ...}}")
        return Finding(path, unknown_key(_dotted(path[:-1]), key, model.model_fields, given))
    if error["type"] == "missing":
        return finding(path, None, "a value: it is needed", f"add {key}: ...")
    if error["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return finding(path, given, "a mapping", "write key: value lines")
    if error["type"] == "list_type":
        return finding(path, given, "a list", "start items with '- '")
    cause = error.get("ctx", {}).get("error")
    return finding(path, given, str(cause or error["msg"]), f"change {key}, or remove it")


def _locate(data: Any, location: Sequence[str | int]) -> tuple[Path, type[BaseModel]]:
    """The path in the file, without pydantic's names of union members, and its section's class."""
    path: list[str | int] = []
    model: Any = File
    for part in location:
        inside = isinstance(data, Mapping) and part in data
        inside |= isinstance(data, list) and isinstance(part, int) and part < len(data)
        if not inside and not _has_field(model, part):
            if part == location[-1] and isinstance(data, Mapping):
                path.append(part)
            break
        path.append(part)
        data = data[part] if inside else None
        if part is not location[-1]:
            model = _section_of(model, part)
    return tuple(path), model


def _has_field(model: Any, name: str | int) -> bool:
    return isinstance(model, type) and issubclass(model, BaseModel) and name in model.model_fields


def _section_of(model: Any, name: str | int) -> Any:
    """The class of a field or of a list's items; of `name`'s value otherwise the same class."""
    if not _has_field(model, name):
        return model
    pending: list[Any] = [model.model_fields[str(name)].annotation]
    while pending:
        kind = pending.pop()
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
        pending += getattr(kind, "__args__", ())
    return model


# --- rules over values ------------------------------------------------------------------------


def items(data: Mapping[str, Any], key: str) -> list[tuple[int, Mapping[str, Any]]]:
    """The mappings of the list `key`, with their indices; what is none is the schema's to say."""
    rows = data.get(key)
    found = enumerate(rows if isinstance(rows, list) else [])
    return [(index, row) for index, row in found if isinstance(row, Mapping)]


def _names(data: Mapping[str, Any]) -> Iterator[Finding]:
    for key, default in (("name", "default"), ("route_prefix", "/")):
        seen: dict[object, int] = {}
        for index, app in items(data, "applications"):
            value = app.get(key, default)
            if not isinstance(value, str):
                continue
            if value in seen:
                path: Path = ("applications", index, key)
                yield finding(path, value, "each one once", f"give this application another {key}")
            seen[value] = index


def _applications(data: Mapping[str, Any]) -> Iterator[Finding]:
    http = data.get("http_options")
    pair = ("ssl_keyfile", "ssl_certfile")
    given = [key for key in pair if isinstance(http, Mapping) and http.get(key)]
    if isinstance(http, Mapping) and len(given) == 1:
        rule = "ssl_keyfile and ssl_certfile together"
        yield finding(("http_options", given[0]), http[given[0]], rule, "add the other")
    for index, app in items(data, "applications"):
        base: Path = ("applications", index)
        yield from _import_path(base, app)
        yield from _route_prefix(base, app.get("route_prefix"))
        yield from _remote_code((*base, "runtime_env"), app.get("runtime_env"))
        for number, one in items(app, "deployments"):
            where: Path = (*base, "deployments", number)
            options = one.get("ray_actor_options")
            if isinstance(options, Mapping):
                env = (*where, "ray_actor_options", "runtime_env")
                yield from _remote_code(env, options.get("runtime_env"))
            yield from _scaling(where, one, bool(app.get("external_scaler_enabled")))
            yield from _placement(where, one)


def _import_path(base: Path, app: Mapping[str, Any]) -> Iterator[Finding]:
    given, path = app.get("import_path"), (*base, "import_path")
    if not isinstance(given, str) or given == BUILDER:
        return
    module, _, attribute = given.partition(":")
    ours = BUILDER.partition(":")[0].partition(".")[0]
    if module.partition(".")[0] == ours or nearest(given, [BUILDER]):
        yield finding(path, given, repr(BUILDER), f"did you mean {BUILDER!r}?")
    elif not module or not attribute or ":" in attribute:
        yield finding(path, given, "'module:name'", "write one colon before the name")
    elif not _brings_code(app) and not _is_installed(module.partition(".")[0]):
        yield finding(
            path, given, "a module that can be imported", "install it, or bring it by runtime_env"
        )


def _brings_code(app: Mapping[str, Any]) -> bool:
    env = app.get("runtime_env")
    plain = {"env_vars", "config"}
    return isinstance(env, Mapping) and not set(env) <= plain


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def _route_prefix(base: Path, given: Any) -> Iterator[Finding]:
    if not isinstance(given, str):
        return
    right = "/" + given.translate({ord(c): None for c in "{}"}).strip("/")
    if given != right:
        rule = "begins with '/', does not end with one, has no '{' or '}'"
        yield finding((*base, "route_prefix"), given, rule, f"write {right}")


def _remote_code(path: Path, env: Any) -> Iterator[Finding]:
    """Serve takes a `working_dir` and `py_modules` that every node can fetch, or has."""
    if not isinstance(env, Mapping):
        return
    modules = env.get("py_modules")
    places: list[tuple[Path, Any]] = [((*path, "working_dir"), env.get("working_dir"))]
    places += [
        ((*path, "py_modules", index), uri)
        for index, uri in enumerate(modules if isinstance(modules, list) else [])
    ]
    for where, uri in places:
        protocol, found, rest = str(uri).partition("://")
        if uri is None or (found and protocol.lower() in _PROTOCOLS and rest):
            continue
        yield finding(
            where, uri, "a URI that every node can fetch (https://, s3://, ...), or local:///folder",
            "upload a zip and name its URI, or remove it",
        )  # fmt: skip


def _scaling(where: Path, one: Mapping[str, Any], is_external: bool) -> Iterator[Finding]:
    number, scaling = one.get("num_replicas"), one.get("autoscaling_config")
    if is_external and (scaling is not None or number == "auto"):
        key = "autoscaling_config" if scaling is not None else "num_replicas"
        rule = "none with external_scaler_enabled: true"
        yield finding((*where, key), one[key], rule, f"remove {key}")
    if not isinstance(scaling, Mapping):
        return
    if isinstance(number, int):
        rule = "absent or 'auto' beside autoscaling_config"
        yield finding((*where, "num_replicas"), number, rule, "remove one of the two")
    low, high = scaling.get("min_replicas", 1), scaling.get("max_replicas", 1)
    high = scaling.get("max_replicas", 100) if number == "auto" else high
    first = scaling.get("initial_replicas")
    if not isinstance(low, int) or not isinstance(high, int):
        return
    key = "max_replicas" if "max_replicas" in scaling else "min_replicas"
    if high < low:
        path = (*where, "autoscaling_config", key)
        rule = f"min_replicas={low} at most max_replicas={high}"
        yield finding(path, scaling.get(key), rule, f"set max_replicas to {low} or more")
    elif isinstance(first, int) and not low <= first <= high:
        path = (*where, "autoscaling_config", "initial_replicas")
        yield finding(path, first, f"from {low} to {high}", f"set it to {low}, or remove it")


def _placement(where: Path, one: Mapping[str, Any]) -> Iterator[Finding]:
    """Settings that Serve does not take together."""
    for key, other in (
        ("max_replicas_per_node", "placement_group_bundles"),
        ("max_replicas_per_node", "gang_scheduling_config"),
        ("placement_group_strategy", "gang_scheduling_config"),
    ):
        if one.get(key) is not None and one.get(other) is not None:
            yield finding((*where, key), one[key], f"none beside {other}", f"remove {key}")
    bundles = one.get("placement_group_bundles")
    labels = one.get("placement_group_bundle_label_selector")
    if isinstance(labels, list) and isinstance(bundles, list) and len(labels) not in (
        1, len(bundles)
    ):  # fmt: skip
        path = (*where, "placement_group_bundle_label_selector")
        yield finding(path, labels, f"1 or {len(bundles)} selectors", "give one per bundle")
