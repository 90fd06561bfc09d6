"""One client, as its own code sees it: parameters, one batch, what the server sent, what it remembers.

A loss is written for one client. The engine calls it for many at once with ``torch.func.vmap``, so
it must be pure: no loops over clients, no ``.item()``, no branches on values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import Tensor

from equipoise.errors import InputError
from equipoise.masked import masked_covariance, masked_mean, masked_sum
from equipoise.models.frozen import transform_level
from equipoise.models.layers import Forward
from equipoise.tree import PERSONAL, Tree, in_parts, squared_distance

if TYPE_CHECKING:
    from equipoise.engine.network import Network, Pass


@dataclass(frozen=True)
class Precomputed:
    """A batch of a phase in which the features do not move.

    Attributes
    ----------
    z : Tensor
        What the features make of the batch.
    fetch : callable
        Returns the batch itself.
    """

    z: Tensor
    fetch: Callable[[], Tensor]


class Inputs:
    """The field ``x`` of a client: a batch, or a frozen one, which is fetched when a loss looks at it.

    Whatever replaces it, or takes it to another client (``dataclasses.replace``), gets and leaves
    an ordinary batch. So z cannot outlive what it was made of.
    """

    def __get__(self, client: Client | None, owner: type[Client]) -> Tensor:
        if client is None:
            raise AttributeError("x has no default")
        given = self.given(client)
        return given.fetch() if isinstance(given, Precomputed) else given

    def __set__(self, client: Client, given: Tensor | Precomputed) -> None:
        vars(client)["x"] = given

    @staticmethod
    def given(client: Client) -> Tensor | Precomputed:
        """Return what the client was made with."""
        given: Tensor | Precomputed = vars(client)["x"]
        return given


@dataclass(frozen=True, kw_only=True)
class Client:
    """What a loss, a fact or a question may look at.

    Attributes
    ----------
    network : Network
        The model as a function of its parameters.
    params : Tree
        The client's parameters and buffers as they are now, its kept parts included.
    x, y : Tensor
        One batch. In phases that leave the features alone, x is fetched only if the loss reads it:
        the model's methods know z.
    forward : Forward
        Mask and random key of the batch, and whether this is training.
    sent : mapping of Tree
        What the server sent: ``model`` and whatever the aggregation sends besides.
    each : mapping of Tensor
        What the server sent to this client alone.
    memory : mapping of Tree
        What the client remembers, its facts included (kept parts are in ``params``).
    seen : Tensor
        Whether the client has taken part before: a flag to compute with instead of a branch.
    round : Tensor
        The number of rounds finished, a scalar.
    positions : Tensor, optional
        In questions and facts: where the samples of the batch are in the client's split, counted
        from 0. They do not depend on how the split is divided into batches.
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
    round: Tensor
    moving: frozenset[str] = frozenset()
    overlaid: frozenset[str] = frozenset()
    positions: Tensor | None = None
    # Not arguments, so that a copy made with ``dataclasses.replace`` records nothing and shares no
    # z.
    recorded: Tree | None = field(init=False, default=None)
    _noted: Tree | None = field(init=False, default=None)
    _computed: Tree = field(init=False, default_factory=dict)
    _level: int = field(init=False, default_factory=transform_level)

    def recording(self, recorded: Tree | None) -> Client:
        """Note the BatchNorm statistics that forward passes leave in ``recorded``, if given, and return the client."""
        object.__setattr__(self, "recorded", recorded)
        return self

    def noting(self, noted: Tree) -> Client:
        """Keep the task's loss in ``noted`` when it is first computed in a step, and return the client."""
        object.__setattr__(self, "_noted", noted)
        return self

    def task_loss_of_step(self) -> Tensor | None:
        """Return the task's loss of each sample, if the method's loss has computed it or the model's output."""
        if self._noted is None:
            return None
        if "task_loss" not in self._noted and "output" in self._computed:
            self._noted["task_loss"] = self.network.task.loss(
                self._computed["output"].detach(), self.y
            )
        return self._noted.get("task_loss")

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
                        f"a phase moves both {shared} and {PERSONAL}{shared}, and its loss asks "
                        "for moved() or a distance, which know them by one name; valid: a phase "
                        "for each"
                    )
                moved[shared] = self.params[name]
        return moved

    def output(self) -> Tensor:
        """Return the model's output for the batch.

        Parts that do not move behave as in evaluation: BatchNorm uses their running statistics and
        dropout drops nothing. Statistics of those that move follow the first output computed with
        them in a step. The output is computed once, however often a loss asks for it.
        """
        if not self.network.composed:
            return self._apply(self.x).output
        known = self._known()
        if "output" not in known:
            if "z" in known:
                known["output"] = self._apply(known["z"], "head").output
            else:
                known["output"], known["z"] = self._from_batch()[:2]
        return known["output"]

    def encoded(self) -> Tensor:
        """Return what the model's stem makes of the batch; x itself if the data are encoded, or if there is no stem.

        If data are not encoded, a loss that needs it should ask for it before it asks for z or the
        output, which then use it too.
        """
        if self.network.encoded or self.network.stem is None:
            return self.x
        known = self._known()
        if "encoded" not in known:
            known["encoded"] = self.network.stemmed(self.params, self.x, self.forward)
        return known["encoded"]

    def features(self) -> Tensor:
        """Return z, what the model's features make of the batch; like the output, it is computed once."""
        self._check_composed()
        known = self._known()
        if "z" not in known:
            known["z"] = self._from_batch("features").z
        return known["z"].to(self.network.dtype)

    def head(self, z: Tensor) -> Tensor:
        """Return the model's output for features."""
        self._check_composed()
        return self._apply(z, "head").output

    def aligned(self) -> tuple[Tensor, Tensor | None]:
        """Return what alignment losses compare, and which rows of it count.

        By default that is one vector a sample: z, or the mean of a map over its positions. The
        model may say otherwise; see :meth:`equipoise.models.base.Model.aligned`.

        Returns
        -------
        tuple
            The rows, ``[rows, d]``, and their mask: that of the batch where rows are samples,
            otherwise ``None``.
        """
        z = self.features()
        # A second look at what the pass through the features has left, so statistics are not
        # recorded again.
        self.network.rest_unless(lambda name: self._kept_as(name) in self.moving)
        rows, samples = (
            self.network.aligned(self.params, z, self.forward),
            self.network.aligns_samples,
        )
        if rows.dim() != 2 or (samples and len(rows) != len(self.y)):
            raise InputError(
                f"aligned of {type(self.network.module).__name__} returned a tensor of shape "
                f"{tuple(rows.shape)} for {len(self.y)} samples; valid: one vector a sample, or "
                "one a class with aligned_rows = 'classes'"
            )
        return rows, self.mask if samples else None

    def part(self, name: str, z: Tensor) -> Tensor:
        """Apply a part that the method has brought (see :meth:`equipoise.method.Part.extend`), or a layer by its name."""
        return self._apply(z, name).output

    def at(
        self,
        params: Mapping[str, Tensor] | None = None,
        x: Tensor | None = None,
        *,
        train: bool = False,
    ) -> Client:
        """Return a copy of the client with other parameters or another batch, for a second look.

        The copy records nothing: BatchNorm's statistics stay what they are. So it is safe inside
        ``torch.func.grad``.

        Parameters
        ----------
        params : mapping of Tensor, optional
            Parameters and buffers to put in place of the client's own; those not named stay.
        x : Tensor, optional
            Another batch of as many samples.
        train : bool
            Whether what moves behaves as in training (dropout, the batch's own statistics). By
            default the copy behaves as in evaluation.

        Returns
        -------
        Client
            A copy.
        """
        given = Inputs.given(self) if x is None else x
        if isinstance(given, Precomputed) and any(
            in_parts(name, "features") for name in params or ()
        ):
            # z belongs to the features it was computed with.
            given = given.fetch()
        client = replace(
            self,
            x=given,
            params={**self.params, **(params or {})},
            moving=self.moving if train else frozenset(),
        )
        if x is None and self.network.inputs is None and "encoded" in (known := self._known()):
            # A stem is frozen, so what it makes of a batch does not depend on parameters.
            client._computed["encoded"] = known["encoded"]
        return client

    def task_loss(self, output: Tensor | None = None) -> Tensor:
        """Return the task's loss, sample by sample: its own, or that of ``training.loss``.

        Parameters
        ----------
        output : Tensor, optional
            Outputs for the batch, such as shifted scores; by default those of the model.

        Returns
        -------
        Tensor
            ``[samples]``.
        """
        values = self.network.task.loss(self.output() if output is None else output, self.y)
        if output is None and self._noted is not None and transform_level() == self._level:
            self._noted.setdefault("task_loss", values.detach())
        return values

    @property
    def classes(self) -> int:
        """The number of classes of the federation.

        Raises
        ------
        InputError
            If the task has no classes.
        """
        if self.network.classes is None:
            raise InputError(
                f"the method asks for the number of classes, which a {self.network.task.name} does "
                "not have"
            )
        return self.network.classes

    def personal(self) -> Client:
        """Return the same client with its personal parts in place of the shared ones."""
        own = {
            n.removeprefix(PERSONAL): value
            for n, value in self.params.items()
            if n.startswith(PERSONAL)
        }
        # Batches are not frozen where clients have personal features, so z is theirs too.
        client = replace(
            self, x=Inputs.given(self), params={**self.params, **own}, overlaid=frozenset(own)
        )
        if "z" in self._computed and not any(in_parts(name, "features") for name in own):
            client._computed["z"] = self._computed["z"]
        if self._noted is not None:
            client.noting(self._noted)
        return client if self.recorded is None else client.recording(self.recorded)

    def distance_to_received(self) -> Tensor:
        """Return the squared L2 distance of the moving parameters from the received global model."""
        return squared_distance(self.moved(), self.received)

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the samples of the batch, padding left out."""
        return masked_sum(values, self.mask)

    def mean(self, values: Tensor) -> Tensor:
        """Average over the samples of the batch, padding left out."""
        return masked_mean(values, self.mask)

    def covariance(self, values: Tensor) -> Tensor:
        """Return the unbiased covariance of the samples of the batch, padding left out."""
        return masked_covariance(values, self.mask)

    def _known(self) -> dict[str, Tensor]:
        """Return z and the output as far as they are computed.

        Inside a transform of the loss's own (``torch.func.grad``) nothing is kept: it would outlive
        the transform.
        """
        given = Inputs.given(self)
        known = self._computed if transform_level() == self._level else {}
        if isinstance(given, Precomputed):
            known.setdefault("z", given.z)
        return known

    def _check_composed(self) -> None:
        if not self.network.composed:
            raise InputError(
                f"the loss looks at features and head apart, but {self.network.name} has a forward "
                "or hooks of its own; valid: models that answer head(features(x)), as "
                "equipoise.models.base.Model does, or the name of the layer that is "
                'the head, such as train(..., head="classifier")'
            )

    def _from_batch(self, part: str | None = None) -> Pass:
        """Apply the model or its features to the batch, after the stem if that has been applied already."""
        known = self._known()
        return (
            self._apply(known["encoded"], part, encoded=True)
            if "encoded" in known
            else self._apply(self.x, part)
        )

    def _apply(self, x: Tensor, part: str | None = None, *, encoded: bool = False) -> Pass:
        self.network.rest_unless(lambda name: self._kept_as(name) in self.moving)
        passed = self.network.apply(self.params, x, self.forward, part, encoded=encoded)
        if self.recorded is not None and transform_level() == self._level:
            for name, value in passed.buffers.items():
                self.recorded.setdefault(self._kept_as(name), value)
        return passed

    def _kept_as(self, name: str) -> str:
        """Return the name a tensor of the model has among the client's own, where personal parts replace shared ones."""
        return PERSONAL + name if name in self.overlaid else name


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
