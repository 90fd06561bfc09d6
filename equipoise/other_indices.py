"""Client indices that Client2Vec is compared with (table 2)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from equipoise.client_index import ClientIndex, make_index, names_in
from equipoise.errors import InputError
from equipoise.federation import Federation
from equipoise.run.api import Run
from equipoise.tree import digest, in_parts


def feature_average(federation: Federation, label_vectors: Tensor | None = None) -> ClientIndex:
    """Return the mean embedding of each client.

    Parameters
    ----------
    federation : Federation
        The clients, whose samples are embeddings.
    label_vectors : Tensor, optional
        A vector for each class. The label index is their mean over samples. By default the label
        index is the frequencies of labels.

    Returns
    -------
    ClientIndex
        Of all clients with training samples.

    Examples
    --------
    >>> x, y = torch.tensor([[1.0, 0.0], [3.0, 2.0], [5.0, 5.0]]), torch.tensor([0, 1, 1])
    >>> federation = Federation.from_arrays(x, y, clients=[0, 0, 1], splits=(1, 0, 0))
    >>> feature_average(federation).features
    tensor([[2., 1.],
            [5., 5.]])
    """
    vectors = _vectors(federation, label_vectors)
    made_by = f"feature average of {federation.fingerprint()}"
    return make_index(federation, lambda x, y: (x.flatten(1).float(), vectors[y]), made_by=made_by)


def class_prototypes(federation: Federation, label_vectors: Tensor | None = None) -> ClientIndex:
    """Return the mean embeddings of the classes of each client, concatenated.

    Classes that a client does not have are zeros. The paper does not define them.

    Parameters
    ----------
    federation, label_vectors
        As in :func:`feature_average`.

    Returns
    -------
    ClientIndex
        Of all clients with training samples. The width of β_f is that of an embedding times the
        number of classes.

    Examples
    --------
    >>> x, y = torch.tensor([[1.0, 0.0], [3.0, 2.0], [5.0, 6.0]]), torch.tensor([0, 1, 1])
    >>> federation = Federation.from_arrays(x, y, clients=[0, 0, 1], splits=(1, 0, 0))
    >>> class_prototypes(federation).features
    tensor([[1., 0., 3., 2.],
            [0., 0., 5., 6.]])
    """
    vectors = _vectors(federation, label_vectors)
    classes = len(vectors)

    def of_samples(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        own = torch.eye(classes, dtype=torch.float32)[y]
        return (own.unsqueeze(2) * x.flatten(1).float().unsqueeze(1)).flatten(1), own

    # The mean over all samples of a client is the share of a class times its prototype.
    shares = make_index(federation, of_samples)
    blocks = shares.features.unflatten(1, (classes, -1))
    present = shares.labels.unsqueeze(2)
    prototypes = torch.where(
        present > 0, blocks / present.clamp_min(torch.finfo(present.dtype).tiny), 0.0
    )
    made_by = f"class prototypes of {federation.fingerprint()}"
    return replace(
        shares, features=prototypes.flatten(1), labels=shares.labels @ vectors, made_by=made_by
    )


def head_weights(run: Run) -> ClientIndex:
    """Return the weights of the heads that clients trained in the last round.

    The paper uses them only for local training, because they change in every round. Here they are
    both parts of the index.

    Parameters
    ----------
    run : Run
        A run with ``evaluation.keep_local``.

    Returns
    -------
    ClientIndex
        Of the clients that took part in the last round.

    Examples
    --------
    >>> from equipoise import Evaluation, train
    >>> from equipoise.data import load
    >>> evaluation = Evaluation(keep_local=True)
    >>> run = train(load("digits"), model="logistic", rounds=1, evaluation=evaluation)
    >>> head_weights(run).features.shape
    torch.Size([22, 650])
    """
    local = run.trainer.local_models()
    heads = [
        stack.flatten(1).float().cpu()
        for name, stack in local.own.items()
        if in_parts(name, "head")
    ]
    if not heads:
        raise InputError(
            f"clients of method {run.summary['method']!r} train no head, so there is no index of "
            "heads"
        )
    weights = torch.cat(heads, 1)
    ids, federation = np.array(local.clients), run.trainer.federation
    return ClientIndex(
        ids,
        weights,
        weights,
        digest({"heads": weights}),
        names=names_in(federation, ids),
        clients=federation.clients,
    )


def _vectors(federation: Federation, label_vectors: Tensor | None) -> Tensor:
    classes = federation.outputs
    if not federation.classes:
        raise InputError(
            f"label indices need classes, but {federation.name!r} is a {federation.task}"
        )
    if label_vectors is None:
        return torch.eye(classes, dtype=torch.float32)
    if label_vectors.dim() != 2 or len(label_vectors) != classes:
        raise InputError(
            f"label_vectors must have a row for each of {classes} classes, got shape "
            f"{tuple(label_vectors.shape)}"
        )
    return label_vectors.float()
