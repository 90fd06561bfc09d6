"""Clusters of clients by their client index, which are known before round 1."""

from __future__ import annotations

from pathlib import Path

import torch

from equipoise.client_index import ClientIndex, directions, index_for
from equipoise.errors import InputError
from equipoise.method import Cohort
from equipoise.solvers import Floats


def index_digest(path: str | None, given: str | None, name: str) -> str | None:
    """Return the hash of the index in a file, so that a run is not resumed with another one.

    Parameters
    ----------
    path : str or None
        The file. Only the server needs it. If it does not exist, ``given`` is returned.
    given : str or None
        The expected hash, if it is known.
    name : str
        The part whose options these are, for errors.

    Returns
    -------
    str or None
        The hash, if it is known.

    Examples
    --------
    >>> index_digest(None, "abc", "gifair")
    Traceback (most recent call last):
    equipoise.errors.InputError: gifair.digest belongs to gifair.index, which is missing
    """
    if path is None:
        if given is not None:
            raise InputError(f"{name}.digest belongs to {name}.index, which is missing")
        return None
    if not Path(path).exists():
        return given
    found = ClientIndex.read(path).digest()
    if given not in (None, found):
        raise InputError(
            f"{name}.digest is {given!r}, but that of the index in {path} is {found!r}"
        )
    return found


def index_points(path: str, everyone: Cohort, compare: str = "both") -> Floats:
    """Return one vector per client: β_f and β_l, each scaled to length 1, or one of them.

    Distances of these vectors follow the similarity of clients: with both parts, the squared
    distance is 4 − 4 S, with S the mean of both cosines.

    Parameters
    ----------
    path : str
        The file of the index.
    everyone : Cohort
        The clients.
    compare : {"both", "features", "labels"}
        Which part of the index is used.

    Returns
    -------
    float array of shape [clients, width]
        In the order of ``everyone.ids``.
    """
    found = index_for(path, everyone)
    points: Floats = torch.cat(
        directions(found.features.double(), found.labels.double(), compare), 1
    ).numpy()
    return points
