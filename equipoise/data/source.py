"""A source: samples before they are divided among clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from equipoise import tasks
from equipoise.attributes import Attribute, attributes_from
from equipoise.data.columns import Columns
from equipoise.errors import InputError
from equipoise.samples import Samples


@dataclass(frozen=True, eq=False, kw_only=True)
class Source:
    """Samples with their labels and, if known, their groups and clients.

    Parameters
    ----------
    x : Tensor or Samples of shape [N, ...]
        The samples.
    y : Tensor
        Targets of the task: int64 labels [N] for classification, floating point numbers [N] or
        [N, d] for regression, masks [N, height, width] for segmentation.
    task : str
        What ``y`` means: a name from :func:`equipoise.tasks.names`.
    classes : int, optional
        Number of classes; one more than the largest label by default.
    name : str
        Name of the source, for messages and records.
    units : array of shape [N], optional
        The unit of each sample, such as the scan of a slice. All samples of a client that belong to
        one unit are in the same split.
    groups : int array of shape [N], optional
        Every sample's group, as a position in ``group_names``.
    group_names : tuple of str
        Names of the groups, the most frequent first if the order matters.
    ids : array of shape [N], optional
        The client of each sample, if known.
    class_names : tuple of str, optional
        Names of the classes, if known.
    test : bool array of shape [N], optional
        Which samples were published for testing. Only these are used for testing, and they are not
        used for training.
    official_test : bool array of shape [N], optional
        Which samples are the published test set of a source whose samples are all divided among
        clients. It is used with ``data.test: server`` only.
    test_of : {"client", "group"}
        The default of ``test`` in `equipoise.data.federate`: whose test samples a client is
        evaluated on.
    attributes : mapping of str to Attribute or array of shape [N], optional
        Properties of samples by whose values models are evaluated.
    columns : Columns, optional
        How the inputs were made of the columns of a table.

    Examples
    --------
    >>> import torch
    >>> Source(x=torch.zeros(3, 2), y=torch.tensor([0, 1, 2])).classes
    3
    """

    x: Tensor | Samples
    y: Tensor
    task: str = "classification"
    classes: int | None = None
    name: str = "custom"
    units: NDArray[Any] | None = None
    groups: NDArray[np.int64] | None = None
    group_names: tuple[str, ...] = ()
    ids: NDArray[Any] | None = None
    class_names: tuple[str, ...] | None = None
    test: NDArray[np.bool_] | None = None
    official_test: NDArray[np.bool_] | None = None
    test_of: str = "client"
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    columns: Columns | None = None

    def __post_init__(self) -> None:
        """Check that the fields are consistent."""
        for part in ("y", "groups", "ids", "units", "test", "official_test"):
            values = getattr(self, part)
            if values is not None and len(values) != len(self.x):
                raise InputError(
                    f"{part} of source {self.name!r} has {len(values)} rows, x has {len(self.x)}"
                )
        if self.test is not None:
            object.__setattr__(self, "test", np.asarray(self.test, bool))
        if not len(self.x):
            raise InputError(f"source {self.name!r} is empty; it needs samples")
        if self.groups is not None and not 0 <= self.groups.min() <= self.groups.max() < len(
            self.group_names
        ):
            raise InputError(
                f"groups of source {self.name!r} run from {self.groups.min()} to "
                f"{self.groups.max()}; valid: 0 to {len(self.group_names) - 1}, positions in "
                "group_names"
            )
        task = tasks.build(self.task)
        # A federation refuses classes where a task has none.
        if self.classes is None or task.classes_in(self.y) is not None:
            object.__setattr__(self, "classes", task.number_of_classes(self.y, self.classes))
        where = f"source {self.name!r}"
        object.__setattr__(self, "attributes", attributes_from(self.attributes, len(self.x), where))
