"""One client, as its own code sees it: parameters, one batch, what the server sent, what it remembers.

A loss is written for one client. The engine calls it for many at once with ``torch.func.vmap``, so it must be pure: no
loops over clients, no ``.item()``, no branches on values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import Tensor

from equipoise.errors import InputError
from equipoise.models.layers import Forward
from equipoise.tree import PERSONAL, Tree, squared_distance

if TYPE_CHECKING:
    from equipoise.engine.network import Network


@dataclass(frozen=True)
class Frozen:
    """A batch whose features rest.

    Attributes
    ----------
    z : Tensor
        What the features make of the batch.
    fetch : callable
        Gives the batch itself.
    """

    z: Tensor
    fetch: Callable[[], Tensor]


class Inputs:
    """The field ``x`` of a client: a batch, or a frozen one, which is fetched when a loss looks at it.

    Whatever replaces it, or takes it to another client (``dataclasses.replace``), gets and leaves an ordinary batch. So z
    cannot outlive what it was made of.
    """

    def __get__(self, client: Client | None, owner: type[Client]) -> Tensor:
        if client is None:
            raise AttributeError("x has no default")
        given = self.given(client)
        return given.fetch() if isinstance(given, Frozen) else given

    def __set__(self, client: Client, given: Tensor | Frozen) -> None:
        vars(client)["x"] = given

    @staticmethod
    def given(client: Client) -> Tensor | Frozen:
        """Return what the client was made with."""
        given: Tensor | Frozen = vars(client)["x"]
        return given


@dataclass(frozen=True, kw_only=True)
class Client:
    """What a loss may look at.

    Attributes
    ----------
    network : Network
        The model as a function of its parameters.
    params : Tree
        The client's parameters and buffers as they are now, its kept parts included.
    x, y : Tensor
        One batch. Where the features rest, x is fetched only if the loss reads it: the model's methods know z.
    forward : Forward
        Mask and random key of the batch, and whether this is training.
    sent : mapping of Tree
        What the server sent: ``model`` and whatever the aggregation sends besides.
    each : mapping of Tensor
        What the server sent to this client alone.
    memory : mapping of Tree
        What the client remembers (kept parts are in ``params``).
    seen : Tensor
        Whether the client has taken part before: a flag to compute with instead of a branch.
    """

    network: Network
    params: Tree
    x: Inputs = Inputs()
    y: Tensor
    forward: Forward
    sent: Mapping[str, Tree]
    each: Mapping[str, Tensor]
    memory: Mapping[str, Tree]
    seen: Tensor
    moving: frozenset[str] = frozenset()
    recorded: Tree = field(default_factory=dict)
    overlaid: frozenset[str] = frozenset()

    @property
    def mask(self) -> Tensor | None:
        """Which rows of the batch are samples; ``None`` when all are."""
        return self.forward.mask

    @property
    def received(self) -> Tree:
        """The global model as it was received."""
        return self.sent["model"]

    def moved(self) -> Tree:
        """Return the parameters this phase moves, under the names of the shared model."""
        moved: Tree = {}
        for name in self.params:
            shared = name.removeprefix(PERSONAL)
            if name in self.moving and shared not in self.network.buffers:
                if shared in moved:
                    raise InputError(
                        f"a phase moves both {shared} and {PERSONAL}{shared}, and its loss asks for moved() or a "
                        "distance, which know them by one name; valid: a phase for each"
                    )
                moved[shared] = self.params[name]
        return moved

    def output(self) -> Tensor:
        """Return the model's output for the batch.

        Parts that do not move behave as in evaluation: BatchNorm uses their running statistics and dropout drops
        nothing. Statistics of those that move follow the first output computed with them in a step.
        """
        given = Inputs.given(self)
        return self._apply(given.z, "head") if isinstance(given, Frozen) else self._apply(given)

    def features(self) -> Tensor:
        """Return z, what the model's features make of the batch, for losses that look at it more than once."""
        self._check_composed()
        given = Inputs.given(self)
        return given.z.to(self.network.dtype) if isinstance(given, Frozen) else self._apply(given, "features")

    def head(self, z: Tensor) -> Tensor:
        """Return the model's output for features."""
        self._check_composed()
        return self._apply(z, "head")

    def _check_composed(self) -> None:
        if not self.network.composed:
            raise InputError(
                f"the loss looks at features and head apart, but {type(self.network.module).__name__} has a forward or hooks "
                "of its own; valid: models that answer head(features(x)), as equipoise.models.base.Model does"
            )

    def _apply(self, x: Tensor, part: str | None = None) -> Tensor:
        self.network.rest_unless(lambda name: self._kept_as(name) in self.moving)
        output, buffers = self.network.output(self.params, x, self.forward, part)
        for name, value in buffers.items():
            self.recorded.setdefault(self._kept_as(name), value)
        return output

    def _kept_as(self, name: str) -> str:
        """Return the name a tensor of the model has among the client's own, where personal parts have been laid over."""
        return PERSONAL + name if name in self.overlaid else name

    def task_loss(self) -> Tensor:
        """Return the task's loss, sample by sample."""
        return self.network.task.loss(self.output(), self.y)

    def personal(self) -> Client:
        """Return the same client with its personal parts in place of the shared ones."""
        own = {n.removeprefix(PERSONAL): value for n, value in self.params.items() if n.startswith(PERSONAL)}
        # Batches are not frozen where clients have personal features, so z is theirs too.
        return replace(self, x=Inputs.given(self), params={**self.params, **own}, overlaid=frozenset(own))

    def distance_to_received(self) -> Tensor:
        """Return the squared L2 distance of the moving parameters from the received global model."""
        return squared_distance(self.moved(), self.received)


@dataclass(frozen=True)
class Finished:
    """A client after local training.

    Attributes
    ----------
    params : Tree
        Its parameters now.
    sent, each, memory, seen
        As in :class:`Client`; the memory is the one it began with.
    steps : Tensor
        How many steps it made.
    lr : Tensor
        The learning rate of those steps.
    """

    params: Tree
    sent: Mapping[str, Tree]
    each: Mapping[str, Tensor]
    memory: Mapping[str, Tree]
    seen: Tensor
    steps: Tensor
    lr: Tensor

    @property
    def received(self) -> Tree:
        """The global model as it was received."""
        return self.sent["model"]
