"""The values chosen by tuning, written beside its runs and read by the comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from equipoise.config import read_yaml
from equipoise.errors import InputError
from equipoise.run.files import write_atomically

CHOSEN = "chosen.yaml"
_ABOUT = """\
# The values that were chosen for the methods of a study, by setting. `equipoise compare` runs them.
# by, split, seed: the metric, the data and the seed used for the choice. among: the number of
# combinations of values with a result. within_tolerance: how many of them had a mean (on the same
# data) at most `tolerance` worse than `reference`, the mean of the study's first method (the best
# one if it has a grid). Among those, `value` is the best of `by`. tied: how many have this value;
# the first of the grid is used.
"""

Choices = dict[str, dict[str, "Choice"]]


@dataclass(frozen=True)
class Choice:
    """The values chosen for a method in a setting, and how.

    Attributes
    ----------
    values : mapping
        The hyper-parameters.
    by : str
        The metric used for the choice.
    split : str
        The split on which it was measured.
    seed : int
        The seed of the runs.
    tolerance : float
        How much worse than ``reference`` the mean could be.
    among : int
        The number of combinations of values with a result.
    within_tolerance : int
        How many of them had a mean within the tolerance. If none had, the best mean was chosen.
    tied : int
        How many of those had the same value as the chosen one, which is the first of them in the
        order of the grid.
    mean, value, reference : float or None
        The mean and the value of ``by`` of the chosen values, and the mean of the study's first
        method, if it has one.

    Examples
    --------
    >>> Choice({"q": 0.1}, "sigma_clients", "val", 0, 0.01, 3, 2, 1, 0.9, 0.05, 0.91).words
    'q: 0.1 (sigma_clients 0.05 on validation data; best of 3 tried, of which 2 have a mean within
    the tolerance)'
    """

    values: Mapping[str, Any]
    by: str
    split: str
    seed: int
    tolerance: float
    among: int
    within_tolerance: int
    tied: int
    mean: float
    value: float
    reference: float | None

    @property
    def words(self) -> str:
        """The choice in one line."""
        written = ", ".join(f"{name}: {value}" for name, value in self.values.items())
        data = "validation data" if self.split == "val" else f"{self.split} data"
        if not self.within_tolerance:
            return (
                f"{written} (mean {self.mean:.4g} on {data}; the best mean of {self.among} tried, "
                "because none is within the tolerance)"
            )
        within = (
            f", of which {self.within_tolerance} have a mean within the tolerance"
            if self.within_tolerance < self.among
            else ""
        )
        tied = f"; the first of {self.tied} equally good" if self.tied > 1 else ""
        return (
            f"{written} ({self.by} {self.value:.4g} on {data}; best of {self.among} tried{within}"
            f"{tied})"
        )


def tuning_directory(out: Path) -> Path:
    """Return the directory of the runs of tuning, given that of a study's runs.

    A directory whose name says that it is for tuning is returned as it is.

    Examples
    --------
    >>> tuning_directory(Path("runs/digits")).name, tuning_directory(Path("digits-tuning")).name
    ('digits-tuning', 'digits-tuning')
    """
    return out if out.name.endswith("-tuning") else out.with_name(f"{out.name}-tuning")


def write_choices(directory: Path, choices: Choices) -> None:
    """Write choices to a directory. Existing ones of other settings and methods are kept.

    Parameters
    ----------
    directory : Path
        The directory of a study.
    choices : dict
        By setting and method.
    """
    path = directory / CHOSEN
    there = read_choices(path) if path.exists() else {}
    merged = {
        setting: {**there.get(setting, {}), **choices.get(setting, {})}
        for setting in dict.fromkeys([*there, *choices])
    }
    plain = {
        s: {method: asdict(choice) for method, choice in of.items()}
        for s, of in merged.items()
        if of
    }
    write_atomically(
        path, (_ABOUT + yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)).encode()
    )


def read_choices(path: Path) -> Choices:
    """Read choices that :func:`write_choices` wrote.

    Parameters
    ----------
    path : Path
        The file, or its directory.

    Returns
    -------
    dict
        By setting and method.
    """
    path = path / CHOSEN if path.is_dir() else path
    try:
        return {
            setting: {method: Choice(**about) for method, about in of.items()}
            for setting, of in read_yaml(path).items()
        }
    except (TypeError, AttributeError) as error:
        raise InputError(
            f"{path} is not a file of choices ({error}); tune the study again"
        ) from error
