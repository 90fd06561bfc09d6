"""The interface of losses, facts and questions to one client.

A loss is written for one client. The engine calls it for many clients at once with
``torch.func.vmap``, so it must be pure: no loops over clients, no ``.item()``, no branches on
values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import Tensor

from equipoise.errors import NAME_THE_HEAD, InputError
from equipoise.masked import masked_covariance, masked_mean, masked_sum
from equipoise.models.frozen import transform_level
from equipoise.models.passes import Forward
from equipoise.tree import PERSONAL, Tree, in_parts, squared_distance

if TYPE_CHECKING:
    from equipoise.engine.network import Network, Pass


@dataclass(frozen=True)
class Precomputed:
    """A batch of a phase that does not train the features.

    Attributes
    ----------
    z : Tensor
        The features of the batch.
    fetch : callable
        Returns the batch itself.
    """

    z: Tensor
    fetch: Callable[[], Tensor]


class Inputs:
    """The field ``x`` of a client: a batch, a :class:`Precomputed` one, or none.

    The batch of a precomputed one is fetched when a loss reads ``x``. A copy of the client
    (``dataclasses.replace``) has an ordinary batch, so z is never used with another x.
    """

    def __get__(self, client: Client | None, owner: type[Client]) -> Tensor:
        if client is None:
            raise AttributeError("x has no default")
        given = self.given(client)
        if given is None:
            raise _without_batch()
        return given.fetch() if isinstance(given, Precomputed) else given

    def __set__(self, client: Client, given: Tensor | Precomputed | None) -> None:
        vars(client)["x"] = given

    @staticmethod
    def given(client: Client) -> Tensor | Precomputed | None:
        """Return what the client was created with."""
        given: Tensor | Precomputed | None = vars(client)["x"]
        return given


class Targets:
    """The field ``y`` of a client: the targets of a batch, or none."""

    def __get__(self, client: Client | None, owner: type[Client]) -> Tensor:
        if client is None:
            raise AttributeError("y has no default")
        if (given := self.given(client)) is None:
            raise _without_batch()
        return given

    def __set__(self, client: Client, given: Tensor | None) -> None:
        vars(client)["y"] = given

    @staticmethod
    def given(client: Client) -> Tensor | None:
        """Return what the client was created with."""
        given: Tensor | None = vars(client)["y"]
        return given


def _without_batch() -> InputError:
    return InputError(
        "linear of a Penalty uses samples, but it is called once and not for every batch; valid: "
        "what the client has received or remembers, such as a fact"
    )


def shared_names(moving: Iterable[str]) -> dict[str, str]:
    """Return the names of trained parameters by the names that they have in the shared model.

    Examples
    --------
    >>> shared_names(["features.weight", "personal.head.weight"])
    {'features.weight': 'features.weight', 'head.weight': 'personal.head.weight'}
    """
    names: dict[str, str] = {}
    for name in moving:
        shared = name.removeprefix(PERSONAL)
        if shared in names:
            raise InputError(
                f"a phase trains both {shared} and {PERSONAL}{shared}, and uses moved(), a "
                "distance or a penalty, which have one name for both; valid: a phase for each"
            )
        names[shared] = name
    return names


@dataclass(frozen=True, kw_only=True)
class Client:
    """What a loss, a fact or a question may use.

    Attributes
    ----------
    network : Network
        The model as a function of its parameters.
    params : Tree
        The client's current parameters and buffers, including its kept parts.
    x, y : Tensor
        One batch. In phases that do not train the features, x is fetched only if the loss reads it,
        because z is known. ``linear`` of a :class:`~equipoise.method.Penalty` has no batch.
    forward : Forward
        Mask and random key of the batch, and whether this is training.
    sent : mapping of Tree
        What the server sent to all clients: ``model`` and what else the aggregation sends.
    each : mapping of Tensor
        What the server sent only to this client.
    memory : mapping of Tree
        The client's memory, including its facts. Kept parts are in ``params``.
    seen : Tensor
        Whether the client has taken part before. Compute with this flag instead of branching.
    round : Tensor
        The number of finished rounds, a scalar.
    positions : Tensor, optional
        In questions and facts: the positions of the batch's samples in the client's split, counted
        from 0. They do not depend on how the split is divided into batches.
    """

    network: Network
    params: Tree
    x: Inputs = Inputs()
    y: Targets = Targets()
    forward: Forward
    sent: Mapping[str, Tree]
    each: Mapping[str, Tensor]
    memory: Mapping[str, Tree]
    seen: Tensor
    round: Tensor
    moving: frozenset[str] = frozenset()
    overlaid: frozenset[str] = frozenset()
    positions: Tensor | None = None
    # Not arguments, so a copy made with ``dataclasses.replace`` records nothing and shares no z.
    recorded: Tree | None = field(init=False, default=None)
    _noted: Tree | None = field(init=False, default=None)
    _computed: Tree = field(init=False, default_factory=dict)
    _level: int = field(init=False, default_factory=transform_level)

    def recording(self, recorded: Tree | None) -> Client:
        """Record BatchNorm statistics of forward passes in ``recorded``, and return the client."""
        object.__setattr__(self, "recorded", recorded)
        return self

    def noting(self, noted: Tree) -> Client:
        """Record the task's first loss of a step in ``noted``, and return the client."""
        object.__setattr__(self, "_noted", noted)
        return self

    def task_loss_of_step(self) -> Tensor | None:
        """Return the task's loss of each sample, if it or the output has been computed."""
        if self._noted is None:
            return None
        if "task_loss" not in self._noted and "output" in self._computed:
            self._noted["task_loss"] = self.network.task.loss(
                self._computed["output"].detach(), self.y
            )
        return self._noted.get("task_loss")

    @property
    def mask(self) -> Tensor | None:
        """Which rows of the batch are samples; ``None`` if all are."""
        return self.forward.mask

    @property
    def received(self) -> Tree:
        """The global model as it was received."""
        return self.sent["model"]

    def moved(self) -> Tree:
        """Return the parameters that this phase trains, by their names in the shared model."""
        trained = [
            name
            for name in self.params
            if name in self.moving and name.removeprefix(PERSONAL) not in self.network.buffers
        ]
        return {shared: self.params[name] for shared, name in shared_names(trained).items()}

    def output(self) -> Tensor:
        """Return the model's output for the batch.

        Parts that are not trained behave as in evaluation: BatchNorm uses running statistics, and
        dropout is off. The first output of a step updates the statistics of trained parts. The
        output is computed once per step, even if a loss uses it several times.
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
        """Return the batch, encoded by the model's stem.

        It is x itself if the data are encoded already, or if there is no stem. Otherwise call it
        before ``features`` and ``output``, which then reuse it.
        """
        if self.network.encoded or self.network.stem is None:
            return self.x
        known = self._known()
        if "encoded" not in known:
            known["encoded"] = self.network.stemmed(self.params, self.x, self.forward)
        return known["encoded"]

    def features(self) -> Tensor:
        """Return z, the features of the batch. It is computed once per step."""
        self._check_composed()
        known = self._known()
        if "z" not in known:
            known["z"] = self._from_batch("features").z
        return known["z"].to(self.network.dtype)

    def head(self, z: Tensor) -> Tensor:
        """Return the model's output for features z."""
        self._check_composed()
        return self._apply(z, "head").output

    def aligned(self) -> tuple[Tensor, Tensor | None]:
        """Return what alignment losses compare, and the mask of its rows.

        By default it is one vector per sample: z, or the mean of a map over its positions. A model
        can override it; see :meth:`equipoise.models.base.Model.aligned`.

        Returns
        -------
        tuple
            The rows, ``[rows, d]``, and their mask: that of the batch if rows are samples,
            otherwise ``None``.
        """
        z = self.features()
        # The pass through the features has recorded statistics already.
        self.network.rest_unless(lambda name: self._kept_as(name) in self.moving)
        rows, samples = (
            self.network.aligned(self.params, z, self.forward),
            self.network.aligns_samples,
        )
        if rows.dim() != 2 or (samples and len(rows) != len(self.y)):
            raise InputError(
                f"aligned of {type(self.network.module).__name__} returned a tensor of shape "
                f"{tuple(rows.shape)} for {len(self.y)} samples; valid: one vector per sample, or "
                "one per class with aligned_rows = 'classes'"
            )
        return rows, self.mask if samples else None

    def part(self, name: str, z: Tensor) -> Tensor:
        """Apply a part that the method adds, or a layer, by name.

        See :meth:`equipoise.method.Part.extend`.
        """
        return self._apply(z, name).output

    def at(
        self,
        params: Mapping[str, Tensor] | None = None,
        x: Tensor | None = None,
        *,
        train: bool = False,
    ) -> Client:
        """Return a copy of the client with other parameters or another batch.

        The copy does not update BatchNorm statistics, so it is safe inside ``torch.func.grad``.

        Parameters
        ----------
        params : mapping of Tensor, optional
            Parameters and buffers that replace those of the same name.
        x : Tensor, optional
            Another batch with the same number of samples.
        train : bool
            Whether trained parts behave as in training (dropout, statistics of the batch). By
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
            # z is valid only for the features that computed it.
            given = given.fetch()
        client = replace(
            self,
            x=given,
            y=Targets.given(self),
            params={**self.params, **(params or {})},
            moving=self.moving if train else frozenset(),
        )
        if x is None and self.network.inputs is None and "encoded" in (known := self._known()):
            # A stem is frozen, so its output does not depend on parameters.
            client._computed["encoded"] = known["encoded"]
        return client

    def task_loss(self, output: Tensor | None = None) -> Tensor:
        """Return the loss of each sample: that of the task, or ``training.loss``.

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
                f"the method needs the number of classes, which a {self.network.task.name} does "
                "not have"
            )
        return self.network.classes

    def personal(self) -> Client:
        """Return the client with its personal parts instead of the shared ones."""
        own = {
            n.removeprefix(PERSONAL): value
            for n, value in self.params.items()
            if n.startswith(PERSONAL)
        }
        # With personal features z is not precomputed, so it belongs to them.
        client = replace(
            self,
            x=Inputs.given(self),
            y=Targets.given(self),
            params={**self.params, **own},
            overlaid=frozenset(own),
        )
        if "z" in self._computed and not any(in_parts(name, "features") for name in own):
            client._computed["z"] = self._computed["z"]
        if self._noted is not None:
            client.noting(self._noted)
        return client if self.recorded is None else client.recording(self.recorded)

    def distance_to_received(self) -> Tensor:
        """Return the squared L2 distance of the trained parameters from the received ones."""
        return squared_distance(self.moved(), self.received)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over the samples of the batch, without padding."""
        return masked_sum(values, self.mask)

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over the samples of the batch, without padding."""
        return masked_mean(values, self.mask)

    def covariance(self, values: Tensor) -> Tensor:
        """Return the unbiased covariance of the samples of the batch, without padding."""
        return masked_covariance(values, self.mask)

    def _known(self) -> dict[str, Tensor]:
        """Return z and the output if they have been computed.

        Inside a transform in the loss (``torch.func.grad``) nothing is kept, because it would not
        be valid outside the transform.
        """
        given = Inputs.given(self)
        known = self._computed if transform_level() == self._level else {}
        if isinstance(given, Precomputed):
            known.setdefault("z", given.z)
        return known

    def _check_composed(self) -> None:
        if not self.network.composed:
            raise InputError(
                f"the loss uses features and head separately, but {self.network.name} has its own "
                "forward or hooks; valid: models that return head(features(x)), as "
                f"equipoise.models.base.Model does, or {NAME_THE_HEAD}"
            )

    def _from_batch(self, part: str | None = None) -> Pass:
        """Apply the model or its features to the batch, which the stem may have encoded."""
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
        """Return the name of a model's tensor in ``params``, with personal parts if used."""
        return PERSONAL + name if name in self.overlaid else name


@dataclass(frozen=True)
class Finished:
    """A client after local training.

    Attributes
    ----------
    params : Tree
        Its parameters after training.
    sent, each, memory, seen
        As in :class:`Client`. The memory is that before training.
    steps : Tensor
        The number of steps.
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
