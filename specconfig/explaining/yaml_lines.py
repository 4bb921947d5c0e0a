"""YAML with line numbers, so that an error can point at the line to change."""

from __future__ import annotations

from typing import Any

import yaml

from specconfig.errors import ConfigError

Path = tuple[str | int, ...]
Lines = dict[Path, int]


class LineLoader(yaml.SafeLoader):
    """SafeLoader that remembers the line of every key and refuses duplicate keys."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.lines: Lines = {(): 1}

    def load(self) -> Any:
        """Parse the single document."""
        node = self.get_single_node()
        if node is None:
            return None
        self._walk(node, ())
        return self.construct_document(node)

    def _walk(self, node: yaml.Node, path: Path) -> None:
        if isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key_node, value_node in node.value:
                key = str(key_node.value)
                line = key_node.start_mark.line + 1
                if key in seen and key != "<<":
                    raise DuplicateKey(key, line)
                seen.add(key)
                self.lines[(*path, key)] = line
                self._walk(value_node, (*path, key))
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self.lines[(*path, index)] = item.start_mark.line + 1
                self._walk(item, (*path, index))


class DuplicateKey(ConfigError):
    """One key written twice in a mapping; YAML would silently keep the last."""

    def __init__(self, key: str, line: int) -> None:
        super().__init__(
            key,
            None,
            "each key once",
            f"remove one of the two {key!r}",
            message=f"key {key!r} is written twice",
        )
        self.line = line

    def __reduce__(self) -> tuple[Any, ...]:
        return (DuplicateKey, (self.field, self.line))


def parse(text: str) -> tuple[Any, Lines]:
    """Data and the line of each key path.

    Raises:
        DuplicateKey: a key is repeated.
        yaml.YAMLError: not YAML.
    """
    loader = LineLoader(text)
    try:
        return loader.load(), loader.lines
    finally:
        loader.dispose()


def line_of(lines: Lines, base: Path, field: str) -> int:
    """Line of a dotted field below ``base``; of the nearest written parent when it is absent."""
    path = base
    for part in field.split("."):
        found = next(
            (
                key
                for key in lines
                if len(key) == len(path) + 1
                and key[:-1] == path
                and str(key[-1]).replace("-", "_") == part
            ),
            None,
        )
        if found is None:
            break
        path = found
    while path not in lines:
        path = path[:-1]
    return lines[path]
