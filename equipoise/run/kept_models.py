"""The models that a run keeps besides those of its state: of the best round, and local ones."""

from __future__ import annotations

from pathlib import Path

from equipoise.errors import InputError
from equipoise.run.checkpoint import BEST, LOCAL, read_local, read_models, save_models
from equipoise.run.evaluation import Models


class KeptModels:
    """The models of the best round so far, and the local models of the last round.

    They are written to the run directory, if there is one. A resumed run reads them when they are
    asked for.

    Parameters
    ----------
    directory : Path, optional
        The run directory.

    Examples
    --------
    >>> kept = KeptModels(None)
    >>> kept.best() is None
    True
    >>> kept.keep_best(Models(3, {}, [], {}))
    >>> kept.best().round
    3
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._best: Models | None = None
        self._local: Models | None = None

    def keep_best(self, models: Models, *, write: bool = True) -> None:
        """Keep the models of the best round. With ``write=False``, the file stays as it is."""
        self._best = models
        if self._directory and write:
            save_models(self._directory / BEST, models)

    def best(self) -> Models | None:
        """Return the models of the best round, if there are any."""
        if self._best is None and self._directory:
            self._best = read_models(self._directory / BEST)
        return self._best

    def check_best(self) -> None:
        """Read the file of the best models, if there is one, and refuse a damaged one."""
        if self._directory and (self._directory / BEST).exists():
            read_models(self._directory / BEST)

    def keep_local(self, models: Models) -> None:
        """Keep the local models."""
        self._local = models
        if self._directory:
            save_models(self._directory / LOCAL, models)

    def local(self) -> Models:
        """Return the local models."""
        if self._local is None:
            if self._directory is None:
                raise InputError(
                    "the run has kept no local models; train it with evaluation.keep_local: true"
                )
            self._local = read_local(self._directory)
        return self._local
