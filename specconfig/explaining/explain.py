"""``paceline explain``: what a config file means, before anything is loaded."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import yaml

from specconfig.app_args import AppArgs
from specconfig.decisions import Decision
from specconfig.engine import EngineConfig
from specconfig.engine_args import EngineArgs
from specconfig.errors import ConfigError, unknown_key
from specconfig.explaining.deployment_rules import Bundles, check_deployments
from specconfig.explaining.explanation import AppExplanation, Explanation, Problem
from specconfig.explaining.schema import app_schema
from specconfig.explaining.serve_rules import BUILDER, Finding, check_file
from specconfig.explaining.text import render
from specconfig.explaining.yaml_lines import DuplicateKey, Lines, Path, line_of, parse
from specconfig.facts.source import FactsSource
from specconfig.options import (
    INJECTED,
    SECTION,
    SpeculativeFields,
    SpeculativeOptions,
    normalise_keys,
)
from specconfig.readers import check_supported
from specconfig.resolving.kv_memory import kv_plan


def explain_file(
    path: str | FilePath,
    facts: FactsSource | None = None,
    *,
    bundles: Bundles | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Explanation:
    """Explain a YAML file of engine args, or a ``serve run`` file with our applications.

    Never raises for what is in the file: problems are part of the result.

    Args:
        bundles: The layout's bundles; without it ``deployments:`` is not held against the plan.
        overrides: Args of every application of ours that win over the file's.
    """
    name = str(path)
    try:
        data, lines = parse(FilePath(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
        message = f"cannot read {name}: {reason}"
        return _failed(name, 1, ConfigError("file", name, "", message=message))
    except DuplicateKey as error:
        return _failed(name, error.line, error)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        gist = str(getattr(error, "problem", None) or error)
        return _failed(
            name, mark.line + 1 if mark else 1, ConfigError("file", gist, "valid YAML", "")
        )
    if not isinstance(data, Mapping):
        return _failed(name, 1, ConfigError("file", data, "a mapping of settings", ""))
    if "applications" in data:
        return _explain_serve(name, data, lines, facts, bundles, overrides or {})
    return _explain_apps(name, [((), "engine", data)], lines, facts, [], [])


def _failed(path: str, line: int, error: ConfigError) -> Explanation:
    return Explanation(path=path, problems=(_problem(line, error.field, error),))


def _problem(line: int, field: str, error: ConfigError) -> Problem:
    message = str(error)
    if error.fix:
        message = message.removesuffix(f"; fix: {error.fix}")
    return Problem(line=line, field=field, value=repr(error.value), message=message, fix=error.fix)


def _explain_serve(
    path: str,
    data: Mapping[str, Any],
    lines: Lines,
    facts: FactsSource | None,
    bundles: Bundles | None,
    overrides: Mapping[str, Any],
) -> Explanation:
    findings = check_file(data)
    ours: list[tuple[Path, str, Any]] = []
    written: dict[str, tuple[Path, Mapping[str, Any]]] = {}
    skipped: list[str] = []
    applications = data.get("applications")
    for index, app in enumerate(applications if isinstance(applications, list) else []):
        if not isinstance(app, Mapping):
            continue
        name = str(app.get("name", "default"))
        if app.get("import_path") != BUILDER:
            skipped.append(f"{name} ({app.get('import_path')})")
            continue
        args = app.get("args") or {}
        if isinstance(args, Mapping):
            ours.append((("applications", index, "args"), name, {**args, **overrides}))
            written[name] = (("applications", index), app)
    explanation = _explain_apps(path, ours, lines, facts, findings, skipped)
    if bundles is None:
        return explanation
    misfits = [
        found for app in explanation.apps
        for found in check_deployments(*written[app.name], app.config, bundles)
    ]  # fmt: skip
    problems = (*explanation.problems, *(_problem_of(lines, found) for found in misfits))
    return explanation.model_copy(update={"problems": problems})


def _problem_of(lines: Lines, found: Finding) -> Problem:
    line = line_of(lines, found.path[:-1], str(found.path[-1])) if found.path else 1
    return _problem(line, found.error.field, found.error)


def _explain_apps(
    path: str,
    ours: Sequence[tuple[Path, str, Any]],
    lines: Lines,
    facts: FactsSource | None,
    findings: Sequence[Finding],
    skipped: Sequence[str],
) -> Explanation:
    problems = [_problem_of(lines, found) for found in findings]
    apps: list[AppExplanation] = []
    for base, name, args in ours:
        try:
            apps.append(_explain_app(name, base, args, lines, facts))
        except _Problems as several:
            problems.extend(several.problems)
        except ConfigError as error:
            problems.append(_problem(_error_line(lines, base, error), error.field, error))
    return Explanation(
        path=path, apps=tuple(apps), problems=tuple(problems), skipped=tuple(skipped)
    )


class _Problems(Exception):
    """Several problems of one application."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(len(problems))
        self.problems = problems


def _error_line(lines: Lines, base: Path, error: ConfigError) -> int:
    if error.field.split(".")[0] not in AppArgs.model_fields and (*base, SECTION) in lines:
        # Facts of a draft checkpoint are named by its own keys; the draft is where to look.
        return line_of(lines, base, f"{SECTION}.model")
    return line_of(lines, base, error.field)


def _unknown(base: Path, args: Mapping[str, Any], lines: Lines) -> list[Problem]:
    """All unknown keys at once, so that one run is enough to correct them."""
    found: list[Problem] = []

    def look(section: str, where: Path, given: Mapping[str, Any], valid: set[str]) -> None:
        for key in given:
            if str(key).replace("-", "_") not in valid:
                error = unknown_key(section, str(key), valid, given[key])
                found.append(_problem(lines.get((*where, str(key)), 1), error.field, error))

    look("", base, args, set(AppArgs.model_fields))
    inner = args.get(SECTION)
    if isinstance(inner, Mapping):
        look(SECTION, (*base, SECTION), inner, {*SpeculativeOptions.model_fields, *INJECTED})
    return found


def _explain_app(
    name: str, base: Path, given: Any, lines: Lines, facts: FactsSource | None
) -> AppExplanation:
    if not isinstance(given, Mapping):
        raise ConfigError("args", given, "a mapping of engine settings", "write key: value lines")
    unknown = _unknown(base, given, lines)
    if unknown:
        raise _Problems(unknown)
    if "model" not in given:
        raise ConfigError("model", None, "a directory, .gguf file or hub id", "add model: ...")
    args = AppArgs.from_mapping(given)
    config = args.resolve(facts)
    own = [field for field in AppArgs.model_fields if field not in EngineArgs.model_fields]
    serving = {field: getattr(args, field) for field in own}
    serving["max_ongoing_requests"] = args.resolved_max_ongoing_requests
    serving["num_replicas"] = args.resolved_num_replicas
    return AppExplanation(
        name=name,
        values=tuple(_values(args, given, config, lines, base)),
        config=config,
        serving=serving,
        memory=kv_plan(config),
        capabilities=capability_row(config),
        cannot_start=_refusal(config, lines, base),
    )


def _refusal(config: EngineConfig, lines: Lines, base: Path) -> Problem | None:
    """Why the server would refuse this plan, although it is valid."""
    try:
        check_supported(config)
    except ConfigError as error:
        return _problem(line_of(lines, base, error.field), error.field, error)
    return None


def _values(
    args: AppArgs, given: Mapping[str, Any], config: EngineConfig, lines: Lines, base: Path
) -> list[Decision]:
    decided = {decision.field: decision for decision in config.decisions}
    keys = normalise_keys(given)
    inner = keys.get("speculative_config")
    inner_keys = normalise_keys(inner) if isinstance(inner, Mapping) else {}

    def row(field: str, value: object, was_given: bool) -> Decision:
        if field in decided:
            found = decided.pop(field)
            if found.source != "given" or not was_given:
                return found
            reason = f"line {line_of(lines, base, field)}; {found.reason}"
            return found.model_copy(update={"reason": reason})
        if was_given:
            line = line_of(lines, base, field)
            return Decision(field=field, value=value, source="given", reason=f"line {line}")
        return Decision(field=field, value=value, source="default", reason="")

    dumped = args.model_dump(mode="json", exclude={"speculative_config", "hf_overrides"})
    rows = [row(field, value, field in keys) for field, value in dumped.items()]
    spec = config.speculative
    if spec is not None:
        values = spec.model_dump(mode="json", include=set(SpeculativeFields.model_fields))
        rows += [
            row(f"speculative_config.{field}", value, field in inner_keys)
            for field, value in values.items()
        ]
    return rows + list(decided.values())


READ = (
    "num_speculative_tokens", "follows_goodput", "num_lookahead_tokens", "max_model_len",
    "draft_max_model_len", "max_num_active_seqs", "drafter_host", "drafter_implementation",
    "draft_placement", "draft_has_own_kv", "uses_last_hidden_state", "aux_hidden_state_layer_ids",
    "acceptance_implementation", "acceptance_options", "is_lossless",
)  # fmt: skip
"""Properties of ``EngineConfig`` that code outside the configuration reads."""


def capability_row(config: EngineConfig) -> dict[str, Any]:
    """What the engine's parts read, by property name, as JSON values."""
    row = {name: getattr(config, name) for name in READ}
    law = config.draft_law
    if law is not None:
        row |= {f"draft_law.{name}": value for name, value in law.model_dump().items()}
    # Tuples become lists, so that the JSON form of an explanation reads back equal.
    plain: dict[str, Any] = json.loads(json.dumps(row))
    return plain


_USAGE = """usage: paceline explain FILE [--json]
       paceline explain --schema

FILE is a YAML of engine args, or a `serve run` file with deploy.app:build applications.
Exit code 0: the file can be served; 1: it is not valid, or this version refuses it; 2: wrong usage.
"""


def main(
    argv: Sequence[str], facts: FactsSource | None = None, bundles: Bundles | None = None
) -> int:
    """Print the explanation of a file; the return value is the exit code."""
    flags = [word for word in argv if word.startswith("-")]
    files = [word for word in argv if not word.startswith("-")]
    if flags == ["--schema"] and not files:
        sys.stdout.write(json.dumps(app_schema(), indent=2, sort_keys=True) + "\n")
        return 0
    if flags in (["-h"], ["--help"]):
        sys.stdout.write(_USAGE)
        return 0
    if len(files) != 1 or flags not in ([], ["--json"]):
        sys.stderr.write(_USAGE)
        return 2
    explanation = explain_file(files[0], facts, bundles=bundles)
    text = explanation.to_json() if flags else render(explanation)
    # Problems go to the same stream as explanations: with --json it is one document either way.
    sys.stdout.write(text.rstrip("\n") + "\n")
    return 0 if explanation.can_start else 1
