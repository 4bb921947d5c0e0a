"""Rules of docs/ARCHITECTURE.md that a machine can check."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from specconfig.app_args import AppArgs
from specconfig.method_names import BUILTIN_METHODS

ROOT = Path(__file__).parents[2]
PACKAGES = ("specconfig", "parallel", "actors", "deploy", "training")
CODE = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_import_contracts_hold() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()",
         "--no-cache"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def method_comparisons(tree: ast.AST) -> Iterator[int]:
    """Lines that compare something with the name of a speculative method."""

    def names(node: ast.expr) -> Iterator[str]:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.Tuple | ast.List | ast.Set):
            for element in node.elts:
                yield from names(element)

    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(name in BUILTIN_METHODS for side in sides for name in names(side)):
                yield node.lineno
        elif isinstance(node, ast.MatchValue) and set(names(node.value)) & BUILTIN_METHODS:
            yield node.value.lineno


def test_the_check_for_method_names_finds_them() -> None:
    source = "x == 'ngram'\ny in ('eagle', 'mtp')\nz == 'other'\nmatch a:\n case 'suffix': pass"
    assert list(method_comparisons(ast.parse(source))) == [1, 2, 5]


def test_no_code_outside_specconfig_compares_a_method_name() -> None:
    found = [
        f"{relative(path)}:{line}"
        for path in CODE
        if path.relative_to(ROOT).parts[0] != "specconfig"
        for line in method_comparisons(ast.parse(path.read_text()))
    ]
    assert not found, "read a capability instead (docs/ARCHITECTURE.md, section 2)"


def imported_modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def test_nothing_imports_tests_or_benchmarks() -> None:
    found = [
        f"{relative(path)} imports {module}"
        for path in CODE
        for module in imported_modules(ast.parse(path.read_text()))
        if module.split(".")[0] in ("tests", "benchmarks", "helm")
    ]
    assert not found


@pytest.mark.parametrize("package", PACKAGES)
def test_an_imported_package_is_ours(package: str) -> None:
    # The names are common on the package index: another distribution may have put one first.
    module = importlib.import_module(package)
    assert module.__file__ is not None
    assert Path(module.__file__).parent == ROOT / package


def test_importing_the_configuration_is_light() -> None:
    code = (
        "import sys, specconfig.app_args, specconfig.explaining.explain;"
        "print([m for m in ('torch', 'ray', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_command_line_starts_without_heavy_imports() -> None:
    code = "import sys, deploy.cli; print([m for m in ('torch', 'ray') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_files_stay_readable() -> None:
    long = {relative(p): n for p in CODE if (n := len(p.read_text().splitlines())) > 600}
    assert not long, "which second job lives there?"


def test_code_is_ascii_and_names_no_machine() -> None:
    for path in CODE:
        text = path.read_text()
        assert text.isascii(), relative(path)
        assert "/root/" not in text and "/work/" not in text, relative(path)


def serve_files() -> list[Path]:
    return sorted((ROOT / "deploy" / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", serve_files(), ids=lambda path: path.name)
def test_every_serve_file_is_valid(path: Path, tmp_path: Path) -> None:
    from ray.serve.schema import DeploymentSchema, ServeApplicationSchema, ServeDeploySchema

    config = yaml.safe_load(path.read_text())
    ServeDeploySchema.model_validate(config)
    # Serve ignores keys it does not know; we do not.
    assert set(config) <= set(ServeDeploySchema.model_fields)
    for app in config["applications"]:
        assert set(app) <= set(ServeApplicationSchema.model_fields)
        assert app["import_path"] == "deploy.app:build"
        for deployment in app.get("deployments", []):
            assert set(deployment) <= set(DeploymentSchema.model_fields)
        AppArgs(**app["args"])


def test_the_demo_file_resolves(tmp_path: Path) -> None:
    from deploy.demo import demo_file
    from deploy.serve_file import read_serve_file
    from tests.tiny import write_tiny_config

    model = write_tiny_config(tmp_path / "m")
    file = read_serve_file(
        demo_file(), port=1234, overrides={"model": str(model), "max_model_len": 256}
    )
    args = AppArgs(**file.config["applications"][0]["args"])
    assert args.resolve().num_speculative_tokens == 4
    assert file.url == "http://127.0.0.1:1234"
