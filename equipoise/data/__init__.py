"""Sources of data, the ways to divide them among clients, and the federations they make.

A source is one file in this folder with a function ``recipe(*, seed, **options)`` that returns a
`Source` and its usual partition. `SOURCES` maps each name to its module. `register` adds
user-defined sources.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from inspect import signature
from typing import Any, TypeVar

from equipoise.data.federate import federate
from equipoise.data.keys import below, naming
from equipoise.data.partition import (
    Assignment,
    ByGroup,
    ClassesPerClient,
    Dirichlet,
    Iid,
    Natural,
    Partition,
    Skewed,
    ThreeGroups,
)
from equipoise.data.picture import draw
from equipoise.data.source import Source
from equipoise.errors import InputError, unknown
from equipoise.federation import Federation
from equipoise.imports import Registry, enter, look_up

__all__ = [
    "PARTITIONS",
    "SOURCES",
    "Assignment",
    "ByGroup",
    "ClassesPerClient",
    "Dirichlet",
    "Iid",
    "Natural",
    "Partition",
    "Skewed",
    "Source",
    "ThreeGroups",
    "draw",
    "federate",
    "load",
    "make_partition",
    "recipe_of",
    "register",
]

Recipe = Callable[..., tuple[Source, Partition] | Federation]
R = TypeVar("R", bound=Recipe)

SOURCES: Registry = {
    "digits": "equipoise.data.digits:recipe",
    "mnist": "equipoise.data.mnist:recipe",
    "emnist": "equipoise.data.emnist:recipe",
    "digitfive": "equipoise.data.digitfive:recipe",
    "cifar": "equipoise.data.cifar:recipe",
    "leaf": "equipoise.data.leaf:recipe",
    "shakespeare": "equipoise.data.shakespeare:recipe",
    "arrays": "equipoise.data.arrays:recipe",
    "table": "equipoise.data.table:recipe",
    "silos": "equipoise.data.silos:recipe",
    "imagefolder": "equipoise.data.imagefolder:recipe",
    "ellipses": "equipoise.data.ellipses:recipe",
    "prostate": "equipoise.data.prostate:recipe",
    "adult": "equipoise.data.adult:recipe",
}
"""What makes each source."""

PARTITIONS: dict[str, type[Partition]] = {
    "iid": Iid,
    "dirichlet": Dirichlet,
    "classes": ClassesPerClient,
    "group": ByGroup,
    "natural": Natural,
    "skewed": Skewed,
    "threegroups": ThreeGroups,
}


def register(recipe: R) -> R:
    """Register a source under the name of its function. Use it as a decorator.

    Parameters
    ----------
    recipe : callable
        Takes ``seed`` and options as keyword arguments, with defaults and type annotations, and
        returns a `Source` and its usual partition. It may return a `Federation` instead, which is
        used unchanged; then the options that divide samples (``partition``, ``splits``,
        ``unseen``, ``leave_out``, ``test``, ``server_val``) are refused.

    Returns
    -------
    callable
        The same function.

    Examples
    --------
    >>> import torch
    >>> @register
    ... def coins(*, seed: int, tosses: int = 60):
    ...     y = torch.arange(tosses) % 2
    ...     return Source(x=y.float().unsqueeze(1), y=y), Iid(3)
    >>> load("coins", tosses=90).train.sizes.tolist()
    [21, 21, 21]
    """
    return enter(SOURCES, recipe, "source")


def recipe_of(name: str) -> Recipe:
    """Return the function that makes a source.

    Examples
    --------
    >>> recipe_of("digits").__module__
    'equipoise.data.digits'
    """
    return look_up(SOURCES, name, "data")


def make_partition(name: str, **options: Any) -> Partition:
    """Create a partition by name, as in configuration files.

    Parameters
    ----------
    name : str
        One of `PARTITIONS`.
    **options
        Parameters of that partition.

    Returns
    -------
    Partition
        Ready to divide a source.

    Examples
    --------
    >>> make_partition("dirichlet", clients=20, beta=0.3)
    Dirichlet(clients=20, beta=0.3, equal=False, min_samples=3)
    """
    if name not in PARTITIONS:
        raise unknown("partition", name, PARTITIONS)
    partition: Partition = _call(PARTITIONS[name], options, f"partition {name!r}", "data.partition")
    return partition


def load(
    name: str,
    *,
    partition: Partition | Mapping[str, Any] | str | None = None,
    splits: tuple[float, float, float] = (0.7, 0.1, 0.2),
    unseen: int | float | Sequence[int | str] = 0,
    leave_out: str | list[str] | None = None,
    test: str | None = None,
    server_val: float = 0.0,
    encode: str | None = None,
    encode_size: int | None = None,
    seed: int = 0,
    **options: Any,
) -> Federation:
    """Load a federation by the name of its source.

    Parameters
    ----------
    name : str
        One of `SOURCES`.
    partition : Partition, mapping or str, optional
        How to divide the source: an object, ``{"name": "dirichlet", "clients": 20, "beta": 0.3}``,
        or a name. The default is the source's usual partition. If ``clients`` of data ``arrays``,
        ``table`` or ``adult`` names the client of each sample, only ``natural`` is valid.
    splits, unseen, leave_out, test, server_val
        See `federate`.
    encode, encode_size
        A pretrained image model whose embeddings replace the samples, and the size to which
        images are resized first; see :func:`equipoise.data.encode.encode_federation`.
    seed : int
        Seed of all random draws.
    **options
        Options of the source, such as ``imbalance`` for the digits.

    Returns
    -------
    Federation
        Ready for training.

    Examples
    --------
    >>> federation = load("digits", imbalance=10)
    >>> federation.clients, federation.shape, federation.group_names
    (22, (1, 8, 8), ('plain', 'blurred', 'inverted', 'rotated', 'textured'))
    """
    # Messages about missing files suggest download=True.
    keys = below("data", options.keys() - {"download"})
    with naming(keys):
        found = _call(recipe_of(name), {"seed": seed, **options}, f"data {name!r}")
    if isinstance(found, Federation):
        given = {
            "partition": partition,
            "splits": tuple(splits),
            "unseen": unseen,
            "leave_out": leave_out,
            "test": test,
        }
        _refuse_to_divide(given | {"server_val": server_val}, name)
        return _encoded(found, encode, encode_size)
    source, usual = found
    if partition is not None and isinstance(usual, Natural):
        _refuse_to_mix(partition, name, options)
    if isinstance(partition, str):
        partition = {"name": partition}
    if isinstance(partition, Mapping):
        if "name" not in partition:
            raise InputError(
                f"partition {dict(partition)} of data {name!r} needs a name; valid: "
                f"{', '.join(PARTITIONS)}"
            )
        with naming(below("data.partition", partition)):
            partition = make_partition(**partition)
    # The options of the usual partition come from those of the source.
    keys = keys if partition is None else below("data.partition", _options_of(partition))
    with naming(keys | below("data", ("splits", "unseen", "leave_out", "test", "server_val"))):
        made = federate(
            source,
            partition or usual,
            splits=splits,
            unseen=unseen,
            leave_out=leave_out,
            test=test,
            server_val=server_val,
            seed=seed,
        )
    return _encoded(made, encode, encode_size)


def _options_of(partition: Partition) -> list[str]:
    return [field.name for field in fields(partition)] if is_dataclass(partition) else []


def _refuse_to_mix(partition: Any, name: str, options: Mapping[str, Any]) -> None:
    """Refuse a partition that would ignore the client of each sample, which an option names."""
    given, usual = options.get("clients"), signature(recipe_of(name)).parameters.get("clients")
    # A number, as in leaf, says how many of the source's own clients are used.
    if usual is None or given == usual.default or isinstance(given, int | None):
        return
    wanted = partition.get("name") if isinstance(partition, Mapping) else partition
    if wanted != "natural" and not isinstance(wanted, Natural):
        raise InputError(
            f"data.partition is {wanted!r}, but data.clients={given!r} names the client of each "
            "sample; valid: data.clients without data.partition (or with natural), or a partition "
            "without data.clients"
        )


def _refuse_to_divide(given: Mapping[str, Any], name: str) -> None:
    """Refuse options that divide samples if the recipe has returned a federation."""
    usual = signature(load).parameters
    for option, value in given.items():
        if value != usual[option].default:
            raise InputError(
                f"data.{option}={value!r} cannot be used with data {name!r}: its recipe returns a "
                "federation, which is already divided; add an option to the recipe instead"
            )


def _encoded(federation: Federation, encode: str | None, encode_size: int | None) -> Federation:
    if encode is None:
        if encode_size is not None:
            raise InputError(
                f"data.encode_size={encode_size!r} needs data.encode, which is not set"
            )
        return federation
    from equipoise.data.encode import encode_federation

    return encode_federation(federation, encode, encode_size)


def _call(function: Any, options: Mapping[str, Any], where: str, path: str = "data") -> Any:
    """Call a function with keyword options; raise an error that names unknown or missing ones.

    ``path`` is the key below which configurations have the options.
    """
    known = signature(function).parameters
    for option in options:
        if option not in known:
            raise unknown("option", option, known, where=where)
    if missing := [
        option
        for option, field in known.items()
        if field.default is field.empty and option not in options
    ]:
        keys = ", ".join(below(path, missing).values())
        raise InputError(f"{where} needs {' and '.join(missing)} ({keys})")
    return function(**options)
