"""Limits that a silo sets for the requests to its client."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from equipoise import methods
from equipoise.config import Experiment, read_yaml, settings_from
from equipoise.engine.settings import Training
from equipoise.errors import InputError, RunError
from equipoise.flower.settings import Privacy
from equipoise.method import Method, Part, Phase

_LONGEST = 80


class Refusal(RunError):
    """A client refuses a request.

    The reason is logged on the client and sent to the server.
    """


def shown(value: object) -> str:
    r"""Return an untrusted value for a message of one line: escaped, and truncated if it is long.

    Examples
    --------
    >>> shown("a\n"), len(shown("a" * 10**6))
    ("'a\\n'", 80)
    """
    text = repr(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a silo allows, whatever experiments and messages request.

    Parameters
    ----------
    methods : tuple of str, optional
        The allowed methods; all by default. A method that combines parts of several methods, or
        wraps another, is allowed if all of these are.
    max_epochs : float, optional
        Maximum number of passes over the training data in a round, in all phases together.
    evaluate_only : bool
        Whether the client evaluates models and never trains.
    privacy : Privacy, optional
        The minimum protection of updates. It is applied even if the experiment has none.

    Examples
    --------
    >>> Limits(methods=("fedavg", "fedprox"), max_epochs=5).evaluate_only
    False
    """

    methods: tuple[str, ...] | None = None
    max_epochs: float | None = None
    evaluate_only: bool = False
    privacy: Privacy | None = None

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        if self.max_epochs is not None and not self.max_epochs > 0:
            raise InputError(f"limits.max_epochs must be above 0, got {self.max_epochs!r}")

    def check(self, experiment: Experiment, samples: int) -> None:
        """Refuse an experiment that exceeds the limits.

        Parameters
        ----------
        experiment : Experiment
            The experiment to run.
        samples : int
            The size of the client's training split.

        Raises
        ------
        Refusal
            The message has the limit and the value of the experiment.

        Examples
        --------
        >>> from equipoise.config import experiment_from
        >>> ditto = experiment_from({"data": "digits", "method": "ditto"})
        >>> Limits(methods=("fedavg",)).check(ditto, 10)
        Traceback (most recent call last):
        equipoise.flower.limits.Refusal: this silo allows the methods fedavg, but the experiment
        uses ditto
        """
        if self.methods is not None:
            known = _parts_of(self.methods)
            if strays := [name for name in _used(experiment.method) if name not in known]:
                raise Refusal(
                    f"this silo allows the methods {', '.join(self.methods) or '(none)'}, "
                    f"but the experiment uses {', '.join(dict.fromkeys(strays))}"
                )
        if self.max_epochs is None:
            return
        phases = {
            "training": experiment.method.local.phases(),
            "adapting": experiment.method.local.adapt(),
        }
        if tuned := experiment.evaluation.fine_tune:
            phases["evaluation.fine_tune"] = (tuned.phase(experiment.training.optimizer),)
        for what, them in phases.items():
            if (passes := epochs_of(them, experiment.training, samples)) > self.max_epochs:
                raise Refusal(
                    f"this silo allows {self.max_epochs:g} epochs in a round, but {what} takes "
                    f"{passes:g}"
                )


def read_limits(path: str | Path) -> Limits:
    r"""Read the limits file of a silo.

    Examples
    --------
    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "limits.yaml"
    >>> _ = file.write_text("methods: [fedavg]\nprivacy: {clip: 1.0}\n")
    >>> read_limits(file).methods
    ('fedavg',)
    """
    file = Path(path).expanduser()
    return settings_from(Limits, read_yaml(file), "limits", str(file))


def epochs_of(phases: Sequence[Phase], training: Training, samples: int) -> float:
    """Return the passes over the training data in all phases; the maximum if there is a range.

    Examples
    --------
    >>> phases = (Phase(), Phase(epochs=3), Phase(steps=4))
    >>> epochs_of(phases, Training(epochs=2, batch_size=10), samples=20)
    7.0
    """
    total = 0.0
    for phase in phases:
        batches = phase.gradient.batches
        # Each of several alternating losses lasts as long as a phase.
        turns = len(phase.loss) if isinstance(phase.loss, tuple) and batches == 1 else 1
        steps = phase.steps if phase.epochs is None else None
        if phase.epochs is None and steps is None:
            steps = _most(training.steps)
        if steps is None:
            total += turns * (_most(training.epochs) or 0 if phase.epochs is None else phase.epochs)
        else:
            total += turns * steps * batches * training.batch_size / max(samples, 1)
    return total


def _most(value: int | tuple[int, int] | None) -> int | None:
    return value[1] if isinstance(value, tuple) else value


def protection(written: Privacy | None, wanted: Privacy | None, limits: Limits) -> Privacy | None:
    """Return the protection of the updates that leave a client.

    Parameters
    ----------
    written : Privacy, optional
        That of the experiment's file.
    wanted : Privacy, optional
        That of the run, which may override the file.
    limits : Limits
        Those of the silo.

    Returns
    -------
    Privacy, optional
        As strict as the experiment and the limits.

    Raises
    ------
    Refusal
        If the run overrides the file's protection with a weaker one.

    Examples
    --------
    >>> protection(None, Privacy(clip=2.0), Limits(privacy=Privacy(clip=1.0))).clip
    1.0
    """
    if written and not _as_strict(wanted, written):
        raise Refusal(
            f"the run weakens flower.privacy: {_words(wanted)} instead of {_words(written)}"
        )
    return stricter(wanted, limits.privacy)


def stricter(one: Privacy | None, other: Privacy | None) -> Privacy | None:
    """Return protection that is at least as strict as both.

    Examples
    --------
    >>> stricter(Privacy(clip=1.0), Privacy(clip=2.0, epsilon=8.0))
    Privacy(clip=1.0, epsilon=8.0, delta=1e-05, sensitivity=None)
    """
    if one is None or other is None:
        return one or other
    if _as_strict(one, other):
        return one
    if _as_strict(other, one):
        return other
    clip = min(one.clip, other.clip)
    noisy = [privacy for privacy in (one, other) if privacy.epsilon is not None]
    epsilon = min(privacy.epsilon for privacy in noisy if privacy.epsilon is not None)
    delta = min(privacy.delta for privacy in noisy)
    made = Privacy(clip=clip, epsilon=epsilon, delta=delta)
    # A sensitivity above clip adds more noise than epsilon requires.
    factor = max(1.0, *(_noise_ratio(privacy) / _noise_ratio(made) for privacy in noisy))
    return (
        Privacy(clip=clip, epsilon=epsilon, delta=delta, sensitivity=clip * factor)
        if factor > 1
        else made
    )


def _as_strict(privacy: Privacy | None, wanted: Privacy) -> bool:
    """Return whether protection is at least as strict as another."""
    if privacy is None or privacy.clip > wanted.clip:
        return False
    if wanted.epsilon is None:
        return True
    if privacy.epsilon is None:
        return False
    noise = _noise_ratio(privacy) > _noise_ratio(wanted) or math.isclose(
        _noise_ratio(privacy), _noise_ratio(wanted)
    )
    return privacy.epsilon <= wanted.epsilon and privacy.delta <= wanted.delta and noise


def _noise_ratio(privacy: Privacy) -> float:
    return privacy.noise / privacy.clip


def _words(privacy: Privacy | None) -> str:
    if privacy is None:
        return "none"
    return ", ".join(f"{item.name} {getattr(privacy, item.name)}" for item in fields(privacy))


@lru_cache(maxsize=8)
def _parts_of(names: tuple[str, ...]) -> set[str]:
    """Return the names of all parts that some methods consist of."""
    valid = set(methods.names())
    return {
        *names,
        *(part for name in names if name in valid for part in _used(methods.build(name))),
    }


def _used(method: Method) -> Iterator[str]:
    """Yield the names of a method and of its client-side parts, including wrapped methods."""
    yield method.name
    for part in dict.fromkeys((method.local, method.aggregation, method.view)):
        yield from _names(part)


def _names(value: Any) -> Iterator[str]:
    if isinstance(value, Method):
        yield from _used(value)
    elif isinstance(value, Part):
        yield value.name
        for item in fields(value):  # type: ignore[arg-type]
            yield from _names(getattr(value, item.name))
