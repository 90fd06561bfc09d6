"""The methods by name: one file for each paper in this directory.

A file registers its parts with :func:`register`. ``build`` creates a method by name, optionally
with other parts.
"""

from __future__ import annotations

import dataclasses
import pkgutil
import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from equipoise.annotations import types_in
from equipoise.errors import InputError, unknown
from equipoise.method import (
    Aggregation,
    Guard,
    LocalRule,
    Method,
    Part,
    Sampler,
    Sees,
    View,
    check_needs,
)
from equipoise.wrapping import Wrapper

SLOTS: dict[str, type[Part]] = {
    "sampler": Sampler,
    "local": LocalRule,
    "aggregation": Aggregation,
    "view": View,
    "guard": Guard,
}
WEIGHTS = ("size", "uniform")
# The option that sets a slot, if its name differs from that of the slot.
_OPTION = {"sampler": "sampling"}
# The method that a part of this kind must define.
_NEEDED = {Sampler: "select", Aggregation: "combine", Guard: "screen"}
# Plain types of hyper-parameters: the accepted class, and its name in messages.
_PLAIN: dict[Any, tuple[type, str]] = {
    float: (Real, "a number"),
    int: (Integral, "a whole number"),
    bool: (bool, "true or false"),
    str: (str, "text"),
    NoneType: (NoneType, "None"),
}

# Parts that can replace a method's own. The sampler is set by ``sampling``.
_EXCHANGED = ("local", "aggregation", "view")

_PARTS: dict[str, type[Part]] = {}
_METHODS: set[str] = set()
P = TypeVar("P", bound=type[Part])


def register(
    name: str, *, paper: str = "", sees: Sees = Sees.NOTHING, method: bool = True
) -> Callable[[P], P]:
    """Register a part under a name. Use it as a decorator above ``@dataclass(frozen=True)``.

    Parameters
    ----------
    name : str
        Lower case, without punctuation.
    paper : str
        The reference of its paper.
    sees : Sees
        What the server sees when the part is used.
    method : bool
        Whether the name denotes a whole method, completed with default parts, or only a part.

    Returns
    -------
    callable
        A class decorator.
    """

    def known(part: P) -> P:
        _refuse_incomplete(part, name)
        if not part.__module__.startswith(f"{__name__}."):
            # User code must not use the name of a method that has not been imported yet.
            _discover()
        before = _PARTS.get(name, part)
        if (before.__module__, before.__qualname__) != (part.__module__, part.__qualname__):
            raise InputError(
                f"the name {name!r} of {part.__qualname__} is taken by {before.__qualname__}; "
                "choose another"
            )
        part.name, part.paper, part.sees = name, paper, sees
        _PARTS[name] = part
        if method:
            _METHODS.add(name)
        return part

    return known


def _refuse_incomplete(part: type[Any], name: str) -> None:
    """Refuse invalid parts now instead of in the first round."""
    if not (isinstance(part, type) and issubclass(part, tuple(SLOTS.values()))):
        kinds = ", ".join(kind.__name__ for kind in SLOTS.values())
        raise InputError(
            f"{part.__qualname__}, registered as {name!r}, is not a part; it must be one of {kinds}"
        )
    if not dataclasses.is_dataclass(part):
        raise InputError(
            f"{part.__qualname__} is not yet a dataclass when it is registered; valid: "
            f"@register({name!r}), below it @dataclass(frozen=True), below that class "
            f"{part.__name__}"
        )
    for field in dataclasses.fields(part):
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise InputError(
                f"{part.__qualname__}, registered as {name!r}, has no default for {field.name}; "
                "add one, so that the part can be created by its name alone"
            )
    for server in (Sampler, Aggregation):
        if issubclass(part, server) and part.begin is not server.begin and not part.needs_everyone:
            raise InputError(
                f"{part.__qualname__}, registered as {name!r}, has a method 'begin', which is "
                "called only for parts with needs_everyone = True"
            )
    if issubclass(part, Aggregation):
        check_needs(part)
    for kind, needed in _NEEDED.items():
        if issubclass(part, kind) and getattr(part, needed) is getattr(kind, needed):
            raise InputError(
                f"{part.__qualname__}, registered as {name!r}, is {_a(kind)} without a method "
                f"{needed!r}"
            )


def _a(kind: type[Part]) -> str:
    return f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"


def _discover() -> dict[str, type[Part]]:
    _import_all()
    return _PARTS


# Every method that is built asks for all names several times; the directory is listed once.
@cache
def _import_all() -> None:
    for module in pkgutil.iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")


def names() -> list[str]:
    """List the names of all methods.

    Examples
    --------
    >>> {"fedavg", "fedprox", "local", "central"} <= set(names())
    True
    """
    _discover()
    return sorted(_METHODS)


def part_class(name: str) -> type[Part]:
    """Return the class registered under a name.

    Examples
    --------
    >>> part_class("fedprox").__name__
    'FedProx'
    """
    parts = _discover()
    if name not in parts:
        raise unknown("method", name, parts)
    return parts[name]


def slots_of(part: type[Part]) -> list[str]:
    """Return the slots of a method that a part can fill.

    Examples
    --------
    >>> slots_of(part_class("scaffold"))
    ['local', 'aggregation']
    """
    return [slot for slot, kind in SLOTS.items() if issubclass(part, kind)]


def option_of(slot: str) -> str:
    """Return the option of a method that sets a slot.

    Examples
    --------
    >>> option_of("sampler"), option_of("guard")
    ('sampling', 'guard')
    """
    return _OPTION.get(slot, slot)


def fitting(slot: str) -> list[str]:
    """List the names of the parts that can fill a slot of a method.

    Examples
    --------
    >>> fitting("sampler")
    ['size', 'uniform']
    """
    return sorted(
        name
        for name, kind in _discover().items()
        if issubclass(kind, SLOTS[slot]) and not issubclass(kind, Wrapper)
    )


def options_of(name: str) -> dict[str, Any]:
    """Return a part's hyper-parameters with their default values.

    Examples
    --------
    >>> options_of("fedprox")
    {'mu': 0.1}
    """
    fields = dataclasses.fields(part_class(name))  # type: ignore[arg-type]
    return {
        field.name: field.default
        if field.default_factory is dataclasses.MISSING
        else field.default_factory()
        for field in fields
    }


def build(
    name: str,
    *,
    weights: str | None = None,
    sampling: Any = None,
    guard: Any = None,
    **options: Any,
) -> Method:
    """Create a method by name.

    Parameters
    ----------
    name : str
        A method's name; see :func:`names`.
    weights : {"size", "uniform"}, optional
        The clients' weights before the aggregation changes them; by default those of the local
        rule's or the aggregation's paper.
    sampling : str, mapping or Sampler, optional
        The sampler: ``uniform`` (the default), ``size``, or another registered one with its
        options.
    guard : str, mapping or Guard, optional
        Processes updates before they are combined: ``norm``, ``krum``, ``multikrum``, or another
        registered guard with its options.
    **options
        The method's hyper-parameters, or parts that replace its own: ``local=``, ``aggregation=``,
        ``view=``, each a name, a mapping with ``name`` and hyper-parameters, or a part. A
        hyper-parameter that is itself a method is given as a name, a mapping or a method. For a
        method that wraps a host, weights and parts are those of the host.

    Returns
    -------
    Method
        The method. Combinations that lack a required part are refused.

    Examples
    --------
    >>> build("fedprox", mu=0.5, aggregation={"name": "fedadam", "lr": 0.01}).aggregation.lr
    0.01
    """
    if name not in names():
        raise unknown("method", name, names())
    if weights is not None and weights not in WEIGHTS:
        raise InputError(f"method.weights: {unknown('weights', weights, WEIGHTS)}")
    if issubclass(part_class(name), Wrapper):
        around = {"weights": weights, "sampling": sampling, "guard": guard}
        return _wrap(
            name, options, {key: value for key, value in around.items() if value is not None}
        )
    exchanged = {slot: options.pop(slot) for slot in _EXCHANGED if slot in options}
    main = make_part({"name": name, **options}, extra=("weights", "sampling", *_EXCHANGED, "guard"))
    parts: dict[str, Any] = {"local": "plain", "aggregation": "fedavg", "view": "everyone"}
    parts["sampler"] = "uniform" if sampling is None else sampling
    parts |= {slot: main for slot in slots_of(type(main))} | exchanged
    parts |= {} if guard is None else {"guard": guard}
    made = {slot: make_part(value, slot) for slot, value in parts.items()}
    if name != "fedavg" and not any(isinstance(part, type(main)) for part in made.values()):
        raise _replaced(name, exchanged, made)
    if options and main not in made.values():
        raise InputError(
            f"method {name!r}: {', '.join(options)} must be given in its "
            f"{' and '.join(slots_of(type(main)))}, which replaces its own"
        )
    usual = getattr(made["local"], "usual_weights", made["aggregation"].usual_weights)
    return Method(name=name, weights=weights or usual, **made)


def _replaced(name: str, exchanged: Mapping[str, Any], made: Mapping[str, Part]) -> InputError:
    """Return the error for a method of which no part remains. It says which method to name."""
    own = [slot for slot in slots_of(part_class(name)) if slot in exchanged]
    instead = ", ".join(f"{slot} {made[slot].name!r}" for slot in own)
    named = next((slot for slot in own if made[slot].name in _METHODS), None)
    first = made[named].name if named else "fedavg"
    # A part that fills several slots fills them as a method, too.
    rest = [
        f"{slot}: {made[slot].name}"
        for slot in exchanged
        if not named or not isinstance(made[slot], type(made[named]))
    ]
    return InputError(
        f"nothing of method {name!r} remains, because it is replaced by {instead}; name the other "
        f"method: {{{', '.join([f'name: {first}', *rest])}}}"
    )


def _wrap(name: str, options: dict[str, Any], around: dict[str, Any]) -> Method:
    """Create a method that wraps a host. Weights and parts given beside the host are the host's."""
    around |= {slot: options.pop(slot) for slot in _EXCHANGED if slot in options}
    if around:
        host = _made_from(options.get("host", options_of(name)["host"]), Method, "method.host")
        options = {**options, "host": build(**{**describe(host), **around})}
    main = make_part({"name": name, **options}, extra=("weights", "sampling", *_EXCHANGED, "guard"))
    parts = dict.fromkeys(SLOTS, main) | {"guard": main.host.guard}
    return Method(name=name, weights=main.host.weights, **parts)


def make_part(value: Any, slot: str | None = None, *, extra: tuple[str, ...] = ()) -> Any:
    """Return a part from a name, a mapping or a part, and check that it fits its slot.

    Examples
    --------
    >>> make_part({"name": "fedprox", "mu": 1.0})
    FedProx(mu=1.0)
    """
    where = f"method.{option_of(slot)}" if slot else "method"
    if isinstance(value, Part):
        part = value
    elif isinstance(value, (str, Mapping)):
        options: dict[str, Any] = {"name": value} if isinstance(value, str) else dict(value)
        if "name" not in options:
            raise InputError(
                f"{where} is {dict(options)!r} without a name; valid: a mapping with 'name'"
            )
        name = options.pop("name")
        if slot and (not isinstance(name, str) or name not in _discover()):
            raise unknown(where, name, fitting(slot))
        kind = part_class(name)
        valid = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
        for key in options:
            if key not in valid:
                raise unknown(f"hyper-parameter of {kind.name}", key, [*valid, *extra], where=where)
        nested = nested_in(kind)
        for key in nested.keys() & options.keys():
            options[key] = _made_from(options[key], nested[key], f"{where}.{key}")
        # The part's own error comes first, because it is more specific.
        try:
            part = kind(**{key: _hashable(value) for key, value in options.items()})
        except InputError as error:
            raise InputError(_with_key(str(error), kind.name, where)) from error
        except (AttributeError, TypeError):
            _check_types(kind, options, where)
            raise
        _check_types(kind, options, where)
    else:
        raise InputError(f"{where} must be a name, a mapping or a part, got {value!r}")
    if slot and isinstance(part, Wrapper):
        raise InputError(
            f"{where}: {part.name!r} wraps a whole method; valid: method: {{name: {part.name}, "
            f"host: ...}}"
        )
    if slot and not isinstance(part, SLOTS[slot]):
        valid_parts = ", ".join(fitting(slot))
        raise InputError(f"{where}: {part.name!r} is not a {slot}; valid: {valid_parts}")
    return part


def nested_in(kind: type[Part]) -> dict[str, type[Method] | str]:
    """Return the options of a part that are methods or parts.

    The values are ``Method``, or the slot that the part must fit.

    Examples
    --------
    >>> nested_in(part_class("fedprox"))
    {}
    """
    try:
        wanted = types_in(kind)
    except NameError:
        # Of a class inside a function, names used in annotations may be out of reach.
        return {}
    found: dict[str, type[Method] | str] = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        options = get_args(wanted[field.name]) or (wanted[field.name],)
        if Method in options:
            found[field.name] = Method
        for slot, part in SLOTS.items():
            if part in options:
                found[field.name] = slot
    return found


def _made_from(value: Any, wanted: type[Method] | str, where: str) -> Any:
    """Create the method or part that is an option of another part."""
    if value is None or isinstance(value, (Method, Part)):
        return value
    if not isinstance(value, (str, Mapping)):
        raise InputError(
            f"{where} must be a name, a mapping with 'name' or a method, got {value!r}"
        )
    try:
        if isinstance(wanted, str):
            return make_part(value, wanted)
        return build(**({"name": value} if isinstance(value, str) else {"name": "fedavg", **value}))
    except InputError as error:
        # Inside the other part, the method is found at another key.
        inner = re.match(r"method(?=[.:])", str(error))
        said = str(error)[inner.end() :] if inner else f": {error}"
        raise InputError(f"{where}{said}") from error


def _with_key(message: str, part: str, where: str) -> str:
    """Put the key of an option before what its part says about it.

    Examples
    --------
    >>> _with_key("fedadam.lr must be at least 0", "fedadam", "method.aggregation")
    'method.aggregation.lr: fedadam.lr must be at least 0'
    """
    option = re.search(rf"(?:^|^unknown |\bin ){re.escape(part)}\.(\w+)", message)
    return f"{where}.{option[1]}: {message}" if option else message


def _hashable(value: Any) -> Any:
    """Turn lists from YAML into tuples: parts must be hashable, because they are keys of caches."""
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def _check_types(kind: type[Part], options: Mapping[str, Any], where: str) -> None:
    """Refuse values that do not match the type annotation of their field."""
    try:
        wanted = types_in(kind)
    except NameError:
        # Of a class inside a function, names used in annotations may be out of reach.
        return
    for key, value in options.items():
        if not _fits(value, wanted[key]):
            raise InputError(
                f"{where}.{key}: {kind.name}.{key} must be {_words(wanted[key])}, got {value!r}"
            )


def _fits(value: Any, wanted: Any) -> bool:
    """Return whether a value matches a type of numbers, bool, str, None and tuples.

    Other types are not checked.
    """
    inner = get_args(wanted)
    if get_origin(wanted) in (Union, UnionType):
        return any(_fits(value, option) for option in inner)
    if wanted is tuple or get_origin(wanted) is tuple:
        if not isinstance(value, tuple | list):
            return False
        if not inner:
            return True
        each = inner[:1] * len(value) if inner[-1] is ... else inner
        return len(value) == len(each) and all(map(_fits, value, each))
    if wanted not in _PLAIN:
        return True
    # bool is a subclass of int in Python.
    return isinstance(value, _PLAIN[wanted][0]) and (wanted is bool or not isinstance(value, bool))


def _words(wanted: Any) -> str:
    inner = get_args(wanted)
    if get_origin(wanted) in (Union, UnionType):
        return " or ".join(map(_words, inner))
    if wanted in _PLAIN:
        return _PLAIN[wanted][1]
    if get_origin(wanted) is not tuple:
        return f"a {getattr(wanted, '__name__', wanted)}"
    if inner[-1] is ...:
        return f"a tuple, each of it {_words(inner[0])}"
    return f"a tuple of {len(inner)}: {', '.join(map(_words, inner))}"


def describe(method: Method) -> dict[str, Any]:
    """Return a method as plain values, from which :func:`build` can create it again.

    Examples
    --------
    >>> describe(build("fedprox", mu=0.5))
    {'name': 'fedprox', 'mu': 0.5, 'weights': 'size', 'sampling': {'name': 'uniform'}}
    """
    if isinstance(method.local, Wrapper):
        return describe_part(method.local)
    usual = build(method.name)
    main = part_class(method.name)
    own = next((part for part in method.parts if isinstance(part, main)), None)
    plain: dict[str, Any] = {"name": method.name} if own is None else describe_part(own)
    plain |= {"weights": method.weights, "sampling": describe_part(method.sampler)}
    for slot in _EXCHANGED:
        part = getattr(method, slot)
        if part is not own and part != getattr(usual, slot):
            plain[slot] = describe_part(part)
    if method.guard is not None and not isinstance(own, Wrapper):
        plain["guard"] = describe_part(method.guard)
    return plain


def describe_part(part: Part) -> dict[str, Any]:
    """Return a part as plain values, from which :func:`make_part` can create it again.

    Examples
    --------
    >>> describe_part(build("fedprox", mu=0.5).local)
    {'name': 'fedprox', 'mu': 0.5}
    """
    fields = dataclasses.fields(part)  # type: ignore[arg-type]
    return {
        "name": part.name,
        **{field.name: describe_option(getattr(part, field.name)) for field in fields},
    }


def describe_option(value: Any) -> Any:
    """Return the value of a hyper-parameter, which may be a method or a part, as plain values.

    Examples
    --------
    >>> describe_option(build("fedavg").local), describe_option(0.5)
    ({'name': 'plain'}, 0.5)
    """
    if isinstance(value, Method):
        return describe(value)
    return describe_part(value) if isinstance(value, Part) else value
