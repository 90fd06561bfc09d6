"""Values of a run for TensorBoard."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import yaml

from equipoise.errors import InputError
from equipoise.run.callbacks import Callback, Snapshot
from equipoise.tracking import round_values, scores


@dataclass
class TensorBoard(Callback):
    """Write event files, which ``tensorboard --logdir DIRECTORY`` shows.

    A resumed run continues its curves. TensorBoard ignores what was written after the checkpoint.

    Parameters
    ----------
    directory : str, optional
        Where event files are written; by default the directory ``tensorboard`` in the run
        directory. So ``tensorboard --logdir STUDY`` shows all runs of a study.

    Examples
    --------
    >>> TensorBoard(directory="logs/first").directory
    'logs/first'
    """

    directory: str | None = None
    packages: ClassVar[tuple[str, ...]] = ("tensorboard",)
    _writer: Any = field(default=None, init=False, repr=False, compare=False)

    def begin(self, run: Snapshot) -> None:
        """Open the event file."""
        from torch.utils.tensorboard import SummaryWriter

        if self.directory is None and run.directory is None:
            raise InputError(
                "tracking: tensorboard needs a directory; use a run directory (out=), or write "
                "tracking: {name: tensorboard, directory: ...}"
            )
        where = Path(self.directory) if self.directory else Path(str(run.directory)) / "tensorboard"
        # Also for a new run, because TensorBoard treats only the second start mark as a restart.
        self._writer = SummaryWriter(str(where), purge_step=run.round + 1)
        if not run.round:
            self._writer.add_text(
                "config", f"```yaml\n{yaml.safe_dump(run.config, sort_keys=False)}\n```", 0
            )

    def evaluated(self, run: Snapshot) -> None:
        """Write the results of a round."""
        self._write(scores(run), run.round)

    def round(self, run: Snapshot) -> None:
        """Write loss and bytes of a round."""
        self._write(round_values(run), run.round)
        # If a run is killed, at most the values of one round are lost.
        self._writer.flush()

    def end(self, run: Snapshot) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()

    def _write(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, new_style=True, double_precision=True)
