r"""LEAF's JSON format (FEMNIST by writer, Shakespeare by role), and LEAF's encoding of text.

A file holds ``{"users": [...], "num_samples": [...], "user_data": {USER: {"x": [...], "y":
[...]}}}``. All files of a folder are read together, and so are the folders ``train`` and ``test``,
because clients make their own splits.

The vocabulary has 80 characters, in the order of `CHARACTERS`: newline, space, ``!"&'(),-.``, the
digits, ``:;>?``, A to Z, ``[]``, a to z, ``}``. Other characters are simplified: accents and the
second letter of ligatures are removed, typographic quotation marks become straight ones, and dashes
become hyphens. Characters that are still unknown become spaces. The length of a text does not
change.
"""

from __future__ import annotations

import json
import string
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.checks import count
from equipoise.data.draws import generator
from equipoise.data.files import data_files, read
from equipoise.data.partition import Natural
from equipoise.data.source import Source
from equipoise.errors import InputError, unknown

CHARACTERS = (
    "\n !\"&'(),-."
    + string.digits
    + ":;>?"
    + string.ascii_uppercase
    + "[]"
    + string.ascii_lowercase
    + "}"
)
DATASETS = ("femnist", "shakespeare")

_PLAIN = {
    "‘": "'",
    "’": "'",
    "“": '"',
    "”": '"',
    "–": "-",
    "—": "-",
    "æ": "a",
    "Æ": "A",
    "œ": "o",
    "Œ": "O",
    "ß": "s",
}

Read = tuple[list[Any], list[Any]]
T = TypeVar("T")


def encode(text: str) -> NDArray[np.int64]:
    """Encode text as integers.

    Parameters
    ----------
    text : str
        Any text.

    Returns
    -------
    int array of the same length
        Positions in `CHARACTERS`.

    Examples
    --------
    >>> "".join(CHARACTERS[number] for number in encode("Brontë—’tis ✓."))
    "Bronte-'tis  ."
    """
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
    found, places = np.unique(points, return_inverse=True)
    return np.array([_number(chr(point)) for point in found], np.int64)[places]


def draw_clients(
    candidates: Sequence[T], wanted: int | None, draws: np.random.Generator, what: str
) -> list[T]:
    """Draw clients at random, without changing their order.

    Parameters
    ----------
    candidates : sequence
        The clients to draw from.
    wanted : int or None
        Number of clients to draw; None returns all of them.
    draws : numpy.random.Generator
        The random generator.
    what : str
        What the candidates are, for the message.

    Returns
    -------
    list
        The clients drawn.

    Examples
    --------
    >>> draw_clients("abc", 3, generator(0, "clients"), "letters")
    ['a', 'b', 'c']
    >>> draw_clients("abc", 4, generator(0, "clients"), "letters")
    Traceback (most recent call last):
    equipoise.errors.InputError: 4 letters requested, but there are only 3
    """
    if wanted is None:
        return list(candidates)
    if count(wanted, what) > len(candidates):
        raise InputError(f"{wanted} {what} requested, but there are only {len(candidates)}")
    return [candidates[place] for place in sorted(draws.permutation(len(candidates))[:wanted])]


def read_leaf(paths: Iterable[Path]) -> dict[str, Read]:
    """Read files in LEAF's format.

    Parameters
    ----------
    paths : iterable of Path
        The files. The samples of a client that is in several files are concatenated.

    Returns
    -------
    dict of str to tuple of two lists
        Every client's x and y, unchanged.

    Examples
    --------
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "all_data.json")
    ...     user_data = '{"ann": {"x": ["to b"], "y": ["e"]}}'
    ...     _ = path.write_text('{"users": ["ann"], "user_data": %s}' % user_data)
    ...     read_leaf([path])
    {'ann': (['to b'], ['e'])}
    """
    clients: dict[str, Read] = {}
    for path in paths:
        try:
            content = json.loads(read(path))
            held = {user: content["user_data"][user] for user in content["users"]}
            samples = {user: (list(mine["x"]), list(mine["y"])) for user, mine in held.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(
                f"{path} is not in LEAF's format, JSON with users and user_data "
                f"({type(error).__name__}: {error})"
            ) from error
        for user, (x, y) in samples.items():
            if len(x) != len(y):
                raise InputError(
                    f"client {user!r} of {path} has {len(x)} samples in x and {len(y)} in y"
                )
            known = clients.setdefault(user, ([], []))
            known[0].extend(x)
            known[1].extend(y)
    return clients


def leaf(
    *, dataset: str = "femnist", root: str | None = None, clients: int | None = None, seed: int = 0
) -> Source:
    """Read a dataset prepared by LEAF, with every sample's client.

    Parameters
    ----------
    dataset : {"femnist", "shakespeare"}
        Images of 62 characters by writer, or text by role. LEAF's images are dark (0) on white (1).
    root : str, optional
        The data directory; see `equipoise.data.files`. Files ``train/*.json`` and ``test/*.json``,
        or ``all_data/*.json``, or ``*.json`` are searched for in the dataset's folder, such as
        ``femnist`` or ``leaf/femnist``, and in ``data`` inside it.
    clients : int, optional
        Number of clients to draw from those with three samples or more; all clients by default.
        GIFAIR's FEMNIST-Original has 500.
    seed : int
        Seed for the draw of clients.

    Returns
    -------
    Source
        Images of shape [1, 28, 28] with labels in the order 0-9A-Za-z; or texts of usually 80
        characters, encoded as positions in `CHARACTERS`, with the next character as label.

    Examples
    --------
    >>> leaf(dataset="mnist")
    Traceback (most recent call last):
    equipoise.errors.InputError: unknown dataset 'mnist' in data 'leaf'; did you mean 'femnist'?
    Valid: femnist, shakespeare
    """
    if dataset not in DATASETS:
        raise unknown("dataset", dataset, DATASETS, where="data 'leaf'")
    if clients is not None:
        count(clients, "clients of data 'leaf'")
    places = (dataset, f"leaf/{dataset}", f"leaf/data/{dataset}")
    paths = data_files(
        "leaf",
        ("train/*.json", "test/*.json"),
        ("all_data/*.json",),
        ("*.json",),
        folders=[folder for place in places for folder in (f"{place}/data", place)],
        root=root,
    )
    held = read_leaf(paths)
    names = [name for name, (x, _) in held.items() if len(x) >= (1 if clients is None else 3)]
    names = draw_clients(names, clients, generator(seed, "clients"), f"clients of LEAF's {dataset}")
    if not names:
        raise InputError(f"no client of LEAF's {dataset} in {paths[0].parent} holds a sample")
    x, y = (_images if dataset == "femnist" else _text)(names, held)
    return Source(
        x=x,
        y=y,
        classes=62 if dataset == "femnist" else len(CHARACTERS),
        name=dataset,
        class_names=tuple(CHARACTERS) if dataset == "shakespeare" else None,
        ids=np.repeat(names, [len(held[name][0]) for name in names]),
    )


def recipe(
    *, seed: int, dataset: str = "femnist", root: str | None = None, clients: int | None = None
) -> tuple[Source, Natural]:
    """Return a dataset prepared by LEAF and its natural partition.

    Parameters
    ----------
    seed : int
        Seed for the draw of clients.
    dataset, root, clients
        See `leaf`.

    Returns
    -------
    tuple of Source and Natural
        The source and its partition.

    Examples
    --------
    >>> recipe(seed=0, root="nowhere")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    equipoise.errors.InputError: no files of data 'leaf' in .../nowhere/femnist/data or ...
    """
    return leaf(dataset=dataset, root=root, clients=clients, seed=seed), Natural()


def _number(character: str) -> int:
    """Return the position of a character, or of its simplified form, in the vocabulary."""
    plain = _PLAIN.get(character) or unicodedata.normalize("NFKD", character)[0]
    return CHARACTERS.index(plain if plain in CHARACTERS else " ")


def _images(names: list[str], held: dict[str, Read]) -> tuple[Tensor, Tensor]:
    pixels, labels = [], []
    for name in names:
        x, y = held[name]
        try:
            pixels.append(np.array(x, np.float32).reshape(len(x), 1, 28, 28))
        except (ValueError, TypeError) as error:
            raise InputError(
                f"client {name!r} of LEAF's femnist has images that are not 784 numbers each"
            ) from error
        mine = np.array(y)
        if mine.dtype.kind not in "iu" or not 0 <= mine.min() <= mine.max() < 62:
            raise InputError(
                f"client {name!r} of LEAF's femnist has labels that are not whole numbers from 0 "
                "to 61"
            )
        labels.append(mine.astype(np.int64))
    return torch.from_numpy(np.concatenate(pixels)), torch.from_numpy(np.concatenate(labels))


def _text(names: list[str], held: dict[str, Read]) -> tuple[Tensor, Tensor]:
    length = len(held[names[0]][0][0])
    for name in names:
        x, y = held[name]
        if not all(isinstance(text, str) for text in x + y):
            raise InputError(f"client {name!r} of LEAF's shakespeare has samples that are not text")
        if odd := next((text for text in x if len(text) != length), None):
            raise InputError(
                f"client {name!r} of LEAF's shakespeare has a sample of {len(odd)} characters, but "
                f"the first sample has {length}; all samples must have the same length"
            )
        if any(len(text) != 1 for text in y):
            raise InputError(
                f"client {name!r} of LEAF's shakespeare has a next character that is not one "
                "character"
            )
    before, after = (
        encode("".join("".join(held[name][part]) for name in names)) for part in (0, 1)
    )
    return torch.from_numpy(before.reshape(len(after), length)), torch.from_numpy(after)
