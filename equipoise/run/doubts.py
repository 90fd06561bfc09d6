"""What a run says at its end about a model that was probably not trained."""

from __future__ import annotations

import math

from equipoise.text import plural

# A model that guesses may fit the few classes of each client a little. Below so many rounds it may
# only have begun to learn.
_SHARE, _ROUNDS = 0.95, 10


def without_step(aggregation: str, rounds: int) -> str:
    """Say that no round has set a tensor of the global model.

    Examples
    --------
    >>> without_step("mine", 3)
    "the global model is still the initial one: combine of aggregation 'mine' has set none of its
    tensors in 3 rounds; valid: state.with_global(mix(updates, cohort.prior)) or the like"
    """
    return (
        f"the global model is still the initial one: combine of aggregation {aggregation!r} has "
        f"set none of its tensors in {plural(rounds, 'round')}; valid: "
        "state.with_global(mix(updates, cohort.prior)) or the like"
    )


def nothing_learned(loss: float, classes: int, rounds: int) -> str | None:
    """Say that a classifier is hardly better than guessing, if it is so after several rounds.

    Parameters
    ----------
    loss : float
        The cross-entropy of clients in training, in the last round.
    classes : int
        The number of classes.
    rounds : int
        How many rounds there were.

    Returns
    -------
    str or None
        With what may help.

    Examples
    --------
    >>> nothing_learned(241.8, 7, rounds=40)
    'after 40 rounds the training loss is 242, and that of equal probabilities for all 7 classes is
    1.95: the model has learned nothing, or training has diverged; another learning rate or
    training.clip may help'
    >>> nothing_learned(0.3, 7, rounds=40) is nothing_learned(2.0, 7, rounds=3) is None
    True
    """
    of_guessing = math.log(classes)
    if classes < 2 or rounds < _ROUNDS or loss < _SHARE * of_guessing:
        return None
    return (
        f"after {rounds} rounds the training loss is {loss:.3g}, and that of equal probabilities "
        f"for all {classes} classes is {of_guessing:.3g}: the model has learned nothing, or "
        "training has diverged; another learning rate or training.clip may help"
    )
