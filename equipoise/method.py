"""The interface of methods.

A method consists of parts. Each part answers one question: which clients take part
(:class:`Sampler`), what each client does and keeps (:class:`LocalRule`), how updates become the new
global model (:class:`Aggregation`), on which view of the federation (:class:`View`), and which
updates are trusted (:class:`Guard`, optional). A part is a frozen dataclass of its
hyper-parameters. Parts can be combined. :class:`Method` refuses a combination in which a part needs
something that no other part provides. The parts of papers are in ``equipoise/methods``, one file
per paper.

Everything that a method needs can be imported from here. Parts are defined in
:mod:`equipoise.method_parts`, what is exchanged in :mod:`equipoise.exchange`, and what a client
does in :mod:`equipoise.phases`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor, nn

from equipoise.errors import InputError
from equipoise.exchange import Cohort, Reports, State, Updates, locate, mix, mix_tree, shift
from equipoise.method_parts import (
    Aggregation,
    Candidates,
    Guard,
    LocalRule,
    Part,
    Sampler,
    Screened,
    Sees,
    View,
    carried_over,
    check_needs,
    check_phases,
)
from equipoise.phases import (
    Fact,
    FollowsRate,
    Gradient,
    Loss,
    Penalty,
    Phase,
    PlainGradient,
    Value,
    class_counts,
    finished_by,
    personal_loss,
    plain_gradient,
    task_loss,
)
from equipoise.random import Purpose, fold, seeded
from equipoise.tree import PERSONAL, Tree

__all__ = [
    "Aggregation",
    "Candidates",
    "Cohort",
    "Fact",
    "FollowsRate",
    "Gradient",
    "Guard",
    "LocalRule",
    "Loss",
    "Method",
    "Part",
    "Penalty",
    "Phase",
    "PlainGradient",
    "Reports",
    "Sampler",
    "Screened",
    "Sees",
    "State",
    "Updates",
    "Value",
    "View",
    "carried_over",
    "check_needs",
    "check_state",
    "class_counts",
    "combine_checked",
    "finished_by",
    "held_by",
    "locate",
    "mix",
    "mix_tree",
    "personal_loss",
    "personal_model",
    "plain_gradient",
    "shift",
    "task_loss",
]


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method: the combination of its parts.

    Parameters
    ----------
    name : str
        Its name in tables.
    sampler, local, aggregation, view : part
        The parts.
    weights : {"size", "uniform"}
        The cohort's prior: the weights of clients before the aggregation changes them.
    guard : Guard, optional
        Checks updates before they are combined; none by default.

    Examples
    --------
    >>> from equipoise.methods import build
    >>> build("fedprox", mu=0.1, sampling="size").local
    FedProx(mu=0.1)
    """

    name: str
    sampler: Sampler
    local: LocalRule
    aggregation: Aggregation
    view: View
    weights: str = "size"
    guard: Guard | None = None

    def __post_init__(self) -> None:
        """Refuse a part that needs something that no other part provides."""
        if self.guard is not None and self.local.keeps == "all":
            raise InputError(
                f"method {self.name!r}: its clients keep the whole model and send nothing, so the "
                f"guard {self.guard.name!r} has nothing to do; leave it out"
            )
        local, aggregation = self.local, self.aggregation
        check_needs(aggregation)
        check_phases(local)
        for reader, wants, giver, gives, slot in (
            (local, local.receives, aggregation, aggregation.sends, "aggregation"),
            (aggregation, aggregation.collects, local, local.uploads, "local"),
        ):
            if missing := set(wants) - set(gives):
                # A part that is both a local rule and an aggregation provides what it needs.
                is_both = isinstance(reader, LocalRule) and isinstance(reader, Aggregation)
                valid = f"; valid: {slot} {reader.name!r}" if is_both and reader.name else ""
                raise InputError(
                    f"method {self.name!r}: {type(reader).__name__} needs "
                    f"{', '.join(sorted(missing))}, which {type(giver).__name__} does not provide"
                    f"{valid}"
                )
        if strays := set(self.aggregation.sends_once) - set(self.aggregation.sends):
            raise InputError(
                f"method {self.name!r}: {type(self.aggregation).__name__} sends "
                f"{', '.join(sorted(strays))} once, but does not name it in sends"
            )
        if self.view.gathers and self.local.keeps:
            raise InputError(
                f"method {self.name!r}: {type(self.local).__name__} keeps parts with clients, but "
                f"with the view {type(self.view).__name__} only the server trains"
            )
        whole = self.aggregation
        if isinstance(whole, LocalRule) and whole.keeps and whole != self.local:
            raise InputError(
                f"method {self.name!r}: {type(whole).__name__} keeps personal parts in its own "
                f"local rule, which {type(self.local).__name__} replaces"
            )

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts, including the guard if there is one."""
        guard = () if self.guard is None else (self.guard,)
        return self.sampler, self.local, self.aggregation, self.view, *guard

    @property
    def distinct_parts(self) -> list[Part]:
        """Every part once: one part may be local rule and aggregation."""
        found: list[Part] = []
        for part in self.parts:
            # Compared, because a part with a dictionary among its options has no hash.
            found += [] if part in found else [part]
        return found

    def extend(self, model: nn.Module, shape: tuple[int, ...], seed: int) -> nn.Module:
        """Return the model with what the parts add; see :meth:`Part.extend`."""
        if self.needs_images and len(shape) != 3:
            raise InputError(
                f"method {self.name!r} works on images of shape (channels, height, width), but a "
                f"sample has shape {tuple(shape)}; valid: a source of images, without data.encode"
            )
        with seeded(fold(seed, Purpose.EXTEND)):
            for part in self.distinct_parts:
                model = part.extend(model, shape)
        return model

    @property
    def sees(self) -> Sees:
        """The most that the server sees of a client because of any part or nested part."""
        return max(shown.sees for part in self.parts for shown in (part, *held_by(part)))

    @property
    def needs_images(self) -> bool:
        """Whether a part or a nested part needs images."""
        return any(shown.needs_images for part in self.parts for shown in (part, *held_by(part)))

    @property
    def usual_model(self) -> str:
        """The model that is used by default."""
        return next((part.usual_model for part in self.parts if part.usual_model), "mlp")

    @property
    def personal(self) -> bool:
        """Whether clients have personal models."""
        return bool(self.local.keeps or self.local.adapt())


def held_by(part: Part) -> list[Method | Part]:
    """List the methods and parts that a part has as options.

    Examples
    --------
    >>> from equipoise.methods import build
    >>> held_by(build("fedprox").local)
    []
    """
    options: list[Any] = (
        [getattr(part, option.name) for option in fields(part)] if is_dataclass(part) else []
    )
    return [option for option in options if isinstance(option, (Method, Part))]


def personal_model(model: Tree, kept: Tree) -> Tree:
    """Return the global model with a client's kept parts in place of the shared ones.

    Examples
    --------
    >>> import torch
    >>> glob = {"features.w": torch.zeros(1), "head.w": torch.zeros(1)}
    >>> personal_model(glob, {"personal.head.w": torch.ones(1)})
    {'features.w': tensor([0.]), 'head.w': tensor([1.])}
    """
    return {**model, **{name.removeprefix(PERSONAL): tensor for name, tensor in kept.items()}}


def combine_checked(
    aggregation: Aggregation, state: State, updates: Updates, cohort: Cohort
) -> State:
    """Call ``combine`` of an aggregation, and check the model that it returns.

    It must have the same names and shapes. Either all tensors that clients sent are set, or none.
    The state before must not change: it may still be evaluated, or ``combine`` called again without
    lost clients.

    Parameters
    ----------
    aggregation : Aggregation
        The aggregation.
    state : State
        The state before.
    updates : Updates
        What the cohort sent.
    cohort : Cohort
        The clients.

    Returns
    -------
    State
        The next state.

    Examples
    --------
    >>> import torch
    >>> class Forgetful(Aggregation):
    ...     name = "forgetful"
    ...     def combine(self, state, updates, cohort):
    ...         return State(state.round, {})
    >>> state, updates = State(0, {"w": torch.zeros(2)}), Updates({}, {}, {}, {})
    >>> combine_checked(Forgetful(), state, updates, None)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    equipoise.errors.InputError: aggregation 'forgetful': combine left w out of the model; ...
    """
    before = _versions(state)
    after: object = aggregation.combine(state, updates, cohort)
    where = f"aggregation {aggregation.name or type(aggregation).__name__!r}: combine"
    if changed := [name for name, version in _versions(state).items() if version != before[name]]:
        raise InputError(
            f"{where} changed {changed[0]} of the state in place; return a new state, and change "
            "copies of its tensors only, such as those of clone()"
        )
    checked = check_state(state, after, where)
    unset = [name for name, tensor in checked.model.items() if tensor is state.model[name]]
    # A round without any new tensor is valid: the weights of all clients may be zero.
    if unset and len(unset) < len(checked.model):
        sent = {*updates.param_names, *updates.buffers}
        if forgotten := [name for name in unset if name in sent]:
            raise InputError(
                f"{where} did not set {forgotten[0]} of the model, which clients sent; set it to "
                f"mix(updates, weights)[{forgotten[0]!r}], or, to keep its old value, to "
                f"state.model[{forgotten[0]!r}].clone()"
            )
    return checked


def _versions(state: State) -> dict[str, int]:
    """Return how often each tensor of a state has been changed in place."""
    trees = {"model": state.model, **state.server}
    return {
        f"{name!r} of {tree!r}": tensor._version
        for tree, tensors in trees.items()
        for name, tensor in tensors.items()
        if not tensor.is_inference()
    }


def check_state(state: State, after: object, where: str) -> State:
    """Return the new state, or raise if its model has other names or shapes."""
    if not isinstance(after, State):
        raise InputError(f"{where} must return a State, got {type(after).__name__}")
    for name in {**state.model, **after.model}:
        if name not in after.model:
            fault = f"left {name} out of the model"
        elif name not in state.model:
            fault = f"added {name} to the model"
        elif not isinstance(after.model[name], Tensor):
            fault = f"made {name} a {type(after.model[name]).__name__} instead of a tensor"
        elif after.model[name].shape != state.model[name].shape:
            shapes = [tuple(tree[name].shape) for tree in (state.model, after.model)]
            fault = f"changed the shape of {name} from {shapes[0]} to {shapes[1]}"
        else:
            continue
        raise InputError(f"{where} {fault}; it must keep all names and shapes")
    return after
