"""The client index that the model of a run makes of its clients."""

from __future__ import annotations

import numpy as np
import torch

from equipoise.client_index import ClientIndex, names_in
from equipoise.engine.contract import ClientsLost, Engine
from equipoise.errors import InputError
from equipoise.federation import Federation
from equipoise.method import Method
from equipoise.tree import Tree, digest


def make_index(
    engine: Engine, method: Method, federation: Federation, model: Tree, round_: int
) -> ClientIndex:
    """Ask all clients with training data for their rows of the index. Lost clients are left out.

    Parameters
    ----------
    engine : Engine
        The engine of the clients.
    method : Method
        The method. Its local rule makes the index.
    federation : Federation
        The clients.
    model : Tree
        The shared model that makes it.
    round_ : int
        Number of finished rounds.

    Raises
    ------
    InputError
        If the local rule makes no index.
    """
    rule = method.local
    if not rule.makes_index:
        raise InputError(
            f"method {method.name!r} makes no client index; valid: the local rule dsaign, "
            "as in method: {name: fedavg, local: dsaign}"
        )
    clients = np.flatnonzero(federation.split("train").sizes)
    cohort = engine.cohort(method, clients, round_)
    while True:
        try:
            found = cohort.ask("own_index", model=model)
            break
        except ClientsLost as lost:
            cohort = cohort.without(lost.ids)
    features, labels = (found[name].float().cpu() for name in ("features", "labels"))
    made_by = digest({**model, f"frozen {engine.network.frozen_digest}": torch.empty(0)})
    return ClientIndex(
        cohort.ids,
        features,
        labels,
        made_by,
        rule.index_epsilon(),
        names_in(federation, cohort.ids),
        federation.clients,
    )
