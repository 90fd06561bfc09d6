"""Type annotations of functions and classes, evaluated once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, get_type_hints


def types_in(annotated: Any) -> Mapping[str, Any]:
    """Return the types in the annotations of a function or a class.

    Evaluating annotations takes longer than checking a value against them, and a study checks the
    same options hundreds of times.

    Raises
    ------
    NameError
        If an annotation uses a name that is unknown in its module.

    Examples
    --------
    >>> def crop(image: str, *, size: "int | None" = 3) -> None: ...
    >>> types_in(crop)["size"]
    int | None
    """
    return _evaluated(annotated)


@cache
def _evaluated(annotated: Any) -> Mapping[str, Any]:
    return MappingProxyType(get_type_hints(annotated))
