"""What the cohorts of all engines check and count, in this process and on Flower."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from equipoise.errors import InputError, unknown
from equipoise.method import Aggregation, LocalRule, Method


def evaluations_for(reports: Iterable[str]) -> int:
    """Count the evaluations that some reports take.

    Loss and score of a model on a split come from the same evaluation.

    Examples
    --------
    >>> evaluations_for(["val_loss_before", "val_loss_after", "val_score_after", "lr"])
    2
    """
    return len(
        {name.replace("score", "loss") for name in reports if name not in ("lr", "gradient_weight")}
    )


def refuse_second_training(trained: bool) -> None:
    """Refuse to train a cohort twice, because the memories of the first training would be lost."""
    if trained:
        raise InputError(
            "this cohort has already trained, and a second training would overwrite the memories "
            "of the first; valid: one train() per round, with a phase for each stage"
        )


def check_rows(each: Mapping[str, Tensor], clients: int) -> None:
    """Refuse tensors for each client that do not have one row per client.

    Examples
    --------
    >>> import torch
    >>> check_rows({"share": torch.ones(2)}, 3)
    Traceback (most recent call last):
    equipoise.errors.InputError: each['share'] has 2 rows for 3 clients; valid: one row per client
    """
    for name, rows in each.items():
        if len(rows) != clients:
            raise InputError(
                f"each[{name!r}] has {len(rows)} rows for {clients} clients; valid: one row per "
                "client"
            )


def question_of(method: Method, question: str) -> Callable[..., Any]:
    """Return the method that answers a question: of the local rule, or else of the aggregation.

    Examples
    --------
    >>> import torch
    >>> from equipoise.methods import build
    >>> class Counting(LocalRule):
    ...     def samples(self, client: Client):
    ...         return client.sum(torch.ones_like(client.y))
    >>> question_of(build("fedavg", local=Counting()), "samples").__name__
    'samples'
    """
    for part, kind in ((method.local, LocalRule), (method.aggregation, Aggregation)):
        answer = getattr(part, question, None)
        if callable(answer) and not hasattr(kind, question):
            return answer
    local = method.local
    own = {
        name
        for name in dir(type(local))
        if not name.startswith("_") and not hasattr(LocalRule, name)
    }
    raise unknown("question", question, own, where=f"the local rule {type(local).__name__}")
