"""YAML and JSON from untrusted files, with limits on time and memory, and errors in one line.

A few lines of YAML can expand to more values than fit into memory, because an alias repeats what it
refers to. Deep nesting and very long numbers cause errors of the interpreter. Such documents are
refused before any value is made.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from equipoise.errors import RunError
from equipoise.text import printable

# Much larger than any configuration, even one that lists thousands of names of clients.
LARGEST_TEXT = 1 << 20
MOST_VALUES = 200_000
DEEPEST = 40
LONGEST_NUMBER = 64


class Loader(yaml.SafeLoader):
    """A YAML loader that refuses duplicate keys and documents beyond the limits of this module."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0
        self._found = 0
        self._flattened: set[int] = set()

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a value, and count the values and how deep they are nested."""
        self._depth += 1
        self._found += 1
        if self._depth > DEEPEST:
            raise self._refused(f"values are nested more than {DEEPEST} deep")
        if self._found > MOST_VALUES:
            raise self._refused(f"it has more than {MOST_VALUES} values")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def get_single_node(self) -> yaml.Node | None:
        """Compose the document. Refuse one that is endless or too large because of its aliases."""
        node = super().get_single_node()
        if node is not None:
            self._count(node, {})
        return node

    def _count(self, node: yaml.Node, known: dict[int, int | None]) -> int:
        """Return the number of values in a node, with aliases expanded."""
        number = id(node)
        if number in known:
            counted = known[number]
            if counted is None:
                raise self._refused("an alias refers to a value that contains it", node)
            return counted
        known[number] = None
        inner: list[yaml.Node] = []
        if isinstance(node, yaml.SequenceNode):
            inner = node.value
        elif isinstance(node, yaml.MappingNode):
            inner = [each for pair in node.value for each in pair]
        total = 1 + sum(self._count(each, known) for each in inner)
        if total > MOST_VALUES:
            raise self._refused(
                f"with its aliases written out it has more than {MOST_VALUES} values", node
            )
        known[number] = total
        return total

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Make a value. If that fails, always raise the same kind of error."""
        try:
            return super().construct_object(node, deep)
        except (
            ValueError,
            TypeError,
            AttributeError,
            KeyError,
            IndexError,
            OverflowError,
        ) as error:
            raise self._refused(
                f"{printable(str(node.value), 60)!r} has no value ({error})", node
            ) from error

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Expand merge keys (``<<``).

        Duplicate keys are refused, but a key may replace a merged one.
        """
        # After merging, replaced keys exist twice.
        if id(node) not in self._flattened:
            self._flattened.add(id(node))
            self._refuse_duplicates(node)
        super().flatten_mapping(node)

    def _refuse_duplicates(self, node: yaml.MappingNode) -> None:
        seen = set()
        for key_node, _ in node.value:
            if (
                not isinstance(key_node, yaml.ScalarNode)
                or key_node.tag == "tag:yaml.org,2002:merge"
            ):
                continue
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise self._refused(f"the key {key!r} comes twice", key_node)
            seen.add(key)

    def bounded_number(self, node: yaml.ScalarNode) -> Any:
        """Make a number, if it does not have too many digits."""
        if len(node.value) > LONGEST_NUMBER:
            raise self._refused(
                f"a number has {len(node.value)} digits; at most {LONGEST_NUMBER} are read", node
            )
        whole = node.tag == "tag:yaml.org,2002:int"
        return self.construct_yaml_int(node) if whole else self.construct_yaml_float(node)

    def _refused(
        self, reason: str, node: yaml.Node | None = None
    ) -> yaml.constructor.ConstructorError:
        return yaml.constructor.ConstructorError(
            None, None, reason, node.start_mark if node else self.get_mark()
        )


for _kind in ("int", "float"):
    Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", Loader.bounded_number)


def yaml_from(text: str) -> Any:
    r"""Read YAML.

    Parameters
    ----------
    text : str
        The document.

    Returns
    -------
    object
        Mappings, lists, numbers, text and dates.

    Raises
    ------
    yaml.YAMLError
        If it is not valid YAML, has duplicate keys, or is too large.

    Examples
    --------
    >>> yaml_from("seed: 3")
    {'seed': 3}
    >>> yaml_from("a: &a [*a]")
    Traceback (most recent call last):
    yaml.constructor.ConstructorError: an alias refers to a value that contains it
      in "<unicode string>", line 1, column 4:
        a: &a [*a]
           ^
    """
    if len(text) > LARGEST_TEXT:
        raise yaml.YAMLError(f"it has {len(text)} characters; at most {LARGEST_TEXT} are read")
    return yaml.load(text, Loader)


def read_json(path: Path) -> Any:
    r"""Read a JSON file.

    Parameters
    ----------
    path : Path
        The file, in UTF-8.

    Returns
    -------
    object
        The content.

    Raises
    ------
    RunError
        If it cannot be read, is truncated, or is not JSON.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "summary.json"
    >>> _ = path.write_text('{"round": 3, "res')
    >>> read_json(path)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    equipoise.errors.RunError: cannot read .../summary.json: Unterminated string starting at: ...
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise RunError(f"cannot read {path}: {error}") from error
