"""Shakespeare's plays by role: predict the next character from the 80 before it.

The file ``roles.jsonl`` has one JSON object per line with ``play``, ``role``, ``gender`` and
``text``. Characters are encoded as in `equipoise.data.leaf`, which also reads LEAF's own files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from equipoise.checks import count, real
from equipoise.data.draws import generator
from equipoise.data.files import data_files, read
from equipoise.data.leaf import CHARACTERS, draw_clients, encode
from equipoise.data.partition import Natural
from equipoise.data.source import Source
from equipoise.errors import InputError, unknown

GENDERS = ("male", "female", "unknown")

# One sample each for training, validation and testing.
_FEWEST_SAMPLES = 3


class Role(NamedTuple):
    """A character of a play, and all of its lines."""

    play: str
    role: str
    gender: str
    text: str


def read_roles(path: Path) -> list[Role]:
    """Read a file of roles.

    Parameters
    ----------
    path : Path
        One JSON object per line.

    Returns
    -------
    list of Role
        In the order of the file.

    Examples
    --------
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "roles.jsonl")
    ...     play = '"play": "Hamlet", "role": "Hamlet"'
    ...     _ = path.write_text('{%s, "gender": "male", "text": "To be"}' % play)
    ...     read_roles(path)
    [Role(play='Hamlet', role='Hamlet', gender='male', text='To be')]
    """
    roles = []
    for number, line in enumerate(read(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
            role = Role(*(content[field] for field in Role._fields))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InputError(
                f"line {number} of {path} is not a JSON object with {', '.join(Role._fields)} "
                f"({type(error).__name__}: {error})"
            ) from error
        if not all(isinstance(value, str) for value in role) or role.gender not in GENDERS:
            raise InputError(
                f"line {number} of {path} must hold text only, and as gender one of "
                f"{', '.join(GENDERS)}; got gender {role.gender!r}"
            )
        roles.append(role)
    return roles


def windows(
    text: str, *, length: int = 80, stride: int = 1
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cut a text into samples: a window of characters, and the character that follows it.

    Parameters
    ----------
    text : str
        The text.
    length : int
        Characters per sample.
    stride : int
        Distance between the beginnings of consecutive samples.

    Returns
    -------
    tuple of int arrays
        Characters [N, length] and next characters [N], as positions in
        `equipoise.data.leaf.CHARACTERS`.

    Examples
    --------
    >>> x, y = windows("to be", length=3)
    >>> ["".join(CHARACTERS[number] for number in (*before, after)) for before, after in zip(x, y)]
    ['to b', 'o be']
    """
    numbers = encode(text)
    if len(numbers) <= length:
        return np.empty((0, length), np.int64), np.empty(0, np.int64)
    cut = np.lib.stride_tricks.sliding_window_view(numbers, length + 1)[::stride]
    return np.ascontiguousarray(cut[:, :-1]), cut[:, -1].copy()


def shakespeare(
    *,
    roles: int | dict[str, int] | None = 31,
    scale: float = 1.0,
    length: int = 80,
    stride: int = 1,
    root: str | None = None,
    seed: int = 0,
) -> Source:
    """Read roles of Shakespeare's plays. Each role is a client, and its gender is its group.

    With ``stride=1`` every character of a role is predicted once, as in LEAF. Consecutive samples
    then overlap and may be in different splits. With ``stride=81`` samples do not overlap.

    Parameters
    ----------
    roles : int, dict or None
        Number of roles to draw, in total (31 in GIFAIR's table 5) or by gender (``{"male": 25,
        "female": 10}`` in table 6); None keeps every role.
    scale : float
        Share of each role's text to keep, from its beginning, in (0, 1].
    length, stride : int
        See `windows`.
    root : str, optional
        The data directory, with ``roles.jsonl`` in ``shakespeare`` or directly in it; see
        `equipoise.data.files`.
    seed : int
        Seed for the draw of roles.

    Returns
    -------
    Source
        Integers [N, 80], and the next character as label, with 80 classes.

    Examples
    --------
    >>> shakespeare(root="nowhere")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    equipoise.errors.InputError: no files of data 'shakespeare' in .../nowhere/shakespeare or ...
    """
    if real(scale, "scale") > 1:
        raise InputError(
            f"scale={scale} of data 'shakespeare' must be a share of each text, above 0 up to 1"
        )
    length, stride = count(length, "length"), count(stride, "stride")
    _check_roles(roles)
    (path,) = data_files("shakespeare", ["roles.jsonl"], folders=["shakespeare", "."], root=root)
    shortest = length + 1 + (_FEWEST_SAMPLES - 1) * stride
    cut = [
        role._replace(text=role.text[: round(scale * len(role.text))]) for role in read_roles(path)
    ]
    chosen = _draw([role for role in cut if len(role.text) >= shortest], roles, seed)
    if not chosen:
        raise InputError(
            f"no role of {path} has the {shortest} characters that three samples need at "
            f"scale={scale}"
        )
    samples = [windows(role.text, length=length, stride=stride) for role in chosen]
    sizes = [len(y) for _, y in samples]
    genders = tuple(gender for gender in GENDERS if any(role.gender == gender for role in chosen))
    return Source(
        x=torch.from_numpy(np.concatenate([x for x, _ in samples])),
        y=torch.from_numpy(np.concatenate([y for _, y in samples])),
        classes=len(CHARACTERS),
        name="shakespeare",
        class_names=tuple(CHARACTERS),
        groups=np.repeat([genders.index(role.gender) for role in chosen], sizes),
        group_names=genders,
        ids=np.repeat([f"{role.play}: {role.role}" for role in chosen], sizes),
    )


def recipe(
    *,
    seed: int,
    roles: int | dict[str, int] | None = 31,
    scale: float = 1.0,
    length: int = 80,
    stride: int = 1,
    root: str | None = None,
) -> tuple[Source, Natural]:
    """Return roles of Shakespeare's plays and their usual partition: every role is a client.

    Parameters
    ----------
    seed : int
        Seed for the draw of roles.
    roles, scale, length, stride, root
        See `shakespeare`.

    Returns
    -------
    tuple of Source and Natural
        The source and its partition.

    Examples
    --------
    >>> recipe(seed=0, root="nowhere")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    equipoise.errors.InputError: no files of data 'shakespeare' in ...
    """
    source = shakespeare(
        roles=roles, scale=scale, length=length, stride=stride, root=root, seed=seed
    )
    return source, Natural()


def _check_roles(wanted: int | dict[str, int] | None) -> None:
    if isinstance(wanted, dict):
        for gender, number in wanted.items():
            if gender not in GENDERS:
                raise unknown("gender", gender, GENDERS, where="roles of data 'shakespeare'")
            count(number, f"roles of data 'shakespeare' for gender {gender!r}")
    elif wanted is not None:
        count(wanted, "roles")


def _draw(candidates: list[Role], wanted: int | dict[str, int] | None, seed: int) -> list[Role]:
    """Draw roles, from all or from each gender, without changing their order."""
    draws = generator(seed, "roles")
    if not isinstance(wanted, dict):
        return draw_clients(candidates, wanted, draws, "roles")
    return [
        role
        for gender, number in wanted.items()
        for role in draw_clients(
            [role for role in candidates if role.gender == gender], number, draws, f"{gender} roles"
        )
    ]
