"""Programs of tensor operations that a CPU repeats without the Python code around them.

A step of a small model takes a CPU less time than Python, ``vmap`` and autograd need to arrange it.
A tape holds the operations that reach PyTorch's kernels in the end. Running it repeats them in the
same order on tensors of the same layout, so the results have the same bits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from equipoise.engine.network import Network
from equipoise.engine.stack import put_together, taken_apart

# How often a program runs before it is recorded. Recording takes as long as a few runs.
RUNS_BEFORE = 2
# While a step is recorded, all its tensors are in memory. A step with larger activations would
# hardly gain, because it takes much longer than the code around it.
LARGEST_BYTES = 1 << 28
# How many programs are known at a time. Unequal clients finish at different steps, and every number
# of active clients is a program of its own.
MOST_PROGRAMS = 256

_ops = torch.ops.aten
# Operations whose results depend on shapes and options only.
_FILLED = {
    _ops.full_like.default,
    _ops.new_full.default,
    _ops.new_ones.default,
    _ops.new_zeros.default,
    _ops.ones_like.default,
    _ops.zeros_like.default,
}
_ATTENTION = _ops._scaled_dot_product_flash_attention_for_cpu.default
# Operations that return what their gradients need only while gradients are enabled: LSTM layers.
_KEEPING = {_ops.mkldnn_rnn_layer.default}
_PRODUCTS = {_ops.mul.Scalar, _ops.mul.Tensor}
# Operations that draw random numbers, and those whose results decide what a program does next.
_NOT_REPEATED = {
    torch.Tag.nondeterministic_seeded,
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
}

# Methods with which code reads values although no operation returns them.
_READING = {Tensor.tolist, Tensor.numpy, Tensor.__array__}

Given = TypeVar("Given")
Made = TypeVar("Made")


def pays_for(network: Network, samples: int) -> bool:
    """Return whether steps of a model with so many samples are small enough to be recorded.

    Examples
    --------
    >>> from equipoise import tasks
    >>> from equipoise.models import build
    >>> model = build("logistic", shape=(2,), classes=3)
    >>> pays_for(Network(model, tasks.build("classification")), samples=10)
    True
    """
    return samples * network.activations * network.dtype.itemsize <= LARGEST_BYTES


class NotRecordable(RuntimeError):
    """A program does something that a tape cannot repeat."""


Tape = Callable[..., list[Tensor]]
"""A recorded program: it takes and returns tensors."""


def record(
    program: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]
) -> tuple[Tape, list[Tensor]]:
    """Run a program, and record it.

    Parameters
    ----------
    program : callable
        Takes tensors, and returns a sequence of tensors. It may read other tensors if these are the
        same in every run.
    inputs : sequence of Tensor
        Its arguments.

    Returns
    -------
    tuple
        The tape, for other inputs of the same shapes and layouts, and the results of this run.

    Raises
    ------
    NotRecordable
        If the program draws random numbers, or does something that depends on values.

    Examples
    --------
    >>> tape, _ = record(lambda x, y: [(x @ y).relu()], [torch.ones(2, 2), torch.ones(2, 2)])
    >>> tape(torch.eye(2), torch.tensor([[1.0, -1.0], [2.0, 3.0]]))
    [tensor([[1., 0.],
            [2., 3.]])]
    """
    # Each input is an object of its own, because a tensor that was given twice may be two in the
    # next run.
    own = [tensor.detach() for tensor in inputs]
    with _Recorder() as recorder, _Reading():
        outputs = [*program(*own)]
    return torch.no_grad()(_Writer(own, outputs, recorder.calls).function()), outputs


@dataclass(eq=False)
class _Call:
    """One operation of a program, with the tensors that it got and returned.

    Attributes
    ----------
    op : operation
        The operation.
    args, options, result : values
        Its arguments by position and by name, and what it returned.
    read, made, written : list of Tensor
        The tensors among the arguments, those among the results, and those that are changed in
        place.
    """

    op: Any
    args: Sequence[Any]
    options: dict[str, Any]
    result: Any
    read: list[Tensor] = field(init=False)
    made: list[Tensor] = field(init=False)
    written: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.read = _tensors_in([*self.args, *self.options.values()])
        self.made = _tensors_in(self.result)
        self.written = _tensors_in(
            [
                self.args[index] if index < len(self.args) else self.options.get(name)
                for index, name in _written_arguments(self.op)
            ]
        )


@cache
def _written_arguments(op: Any) -> list[tuple[int, str]]:
    """Return the positions and names of the arguments that an operation changes in place."""
    return [
        (index, argument.name)
        for index, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


class _Recorder(TorchDispatchMode):
    """Notes every operation that reaches PyTorch's kernels.

    The calls keep their tensors, so no two of them are at the same place in memory unless one is a
    view of the other.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Do not let PyTorch import its compiler, which takes seconds. None is at work here."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        # Before the operation, so that no random numbers are used up.
        if not _can_be_repeated(func, args, kwargs or {}):
            raise NotRecordable(f"{func} depends on values or draws random numbers")
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, Tensor | tuple | list | None):
            raise NotRecordable(f"{func} returns {type(result).__name__}, no tensor")
        self.calls.append(_Call(func, args, kwargs or {}, result))
        return result


class _Reading(TorchFunctionMode):
    """Refuses programs that read the values of tensors without an operation."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READING:
            raise NotRecordable(f"{func.__name__} reads values")
        return func(*args, **(kwargs or {}))


def _can_be_repeated(op: Any, args: Sequence[Any], options: dict[str, Any]) -> bool:
    """Return whether an operation depends on its arguments only, and the next ones not on it."""
    if _NOT_REPEATED.isdisjoint(op.tags):
        return True
    if op is _ops.index.Tensor:
        # The shape depends on the values of masks, but not on those of integers.
        masks = (torch.bool, torch.uint8)
        return not any(index.dtype in masks for index in args[1] if index is not None)
    # Attention draws random numbers for dropout only.
    return op is _ATTENTION and (*args[3:4], options.get("dropout_p", 0.0))[0] == 0


class _Writer:
    """Writes the operations of a program as a Python function.

    Operations without effect are left out: views of a whole tensor, products with 1, and those
    whose results nothing reads. What depends on no input is computed once.
    """

    def __init__(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], calls: Sequence[_Call]
    ) -> None:
        self._inputs, self._outputs = inputs, outputs
        # Names of tensors by their identity, and the values of all names but local variables.
        self._names: dict[int, str] = {}
        self._values: dict[str, Any] = {}
        # Names of tensors that are the same in every run.
        self._constants: set[str] = set()
        for tensor in inputs:
            self._name(tensor)
        self._calls = self._needed(self._with_effect(calls))

    def function(self) -> Tape:
        """Return the function."""
        returned = [self._read(tensor) for tensor in self._outputs]
        given = [self._names[id(tensor)] for tensor in self._inputs]
        # A variable is deleted after its last use, which frees memory as Python would.
        reads = [self._variables(call.read) for call in self._calls]
        last = {name: call for call, read in zip(self._calls, reads, strict=True) for name in read}
        lines = []
        for call, read in zip(self._calls, reads, strict=True):
            made = self._variables(call.made)
            lines.append(self._line(call))
            done = {name for name in read if last[name] is call}
            done |= {name for name in made if name not in last}
            if done := done.difference(given, returned):
                lines.append(f"del {', '.join(sorted(done))}")
        head, tail = f"def run({', '.join(given)}):", f"return [{', '.join(returned)}]"
        found: dict[str, Any] = {}
        exec("\n    ".join([head, *lines, tail]), self._values, found)
        function: Tape = found["run"]
        return function

    def _with_effect(self, calls: Sequence[_Call]) -> list[_Call]:
        """Name all tensors, and return the calls whose results are not known beforehand."""
        # Memory that may change after it was filled. Whoever gets the results may change them.
        changed = {_place(tensor) for call in calls for tensor in call.written}
        changed |= {_place(tensor) for tensor in self._outputs}
        met = {_place(tensor) for tensor in self._inputs}
        kept = []
        for call in calls:
            for tensor in call.read:
                if id(tensor) not in self._names and _place(tensor) in met:
                    raise NotRecordable(f"{call.op} reads a tensor that no operation returned")
            read = {self._read(tensor) for tensor in call.read}
            made = {_place(tensor) for tensor in call.made}
            met |= made
            same = _same(call, changed)
            if same is not None:
                self._names[id(call.result)] = self._names[id(same)]
            elif (read <= self._constants or call.op in _FILLED) and made.isdisjoint(changed):
                self._constants |= {self._hold(tensor) for tensor in call.made}
            else:
                for tensor in call.made:
                    self._name(tensor)
                kept.append(call)
        return kept

    def _needed(self, calls: Sequence[_Call]) -> list[_Call]:
        """Return the calls that change something, or whose results are read."""
        wanted = {self._read(tensor) for tensor in self._outputs}
        needed = []
        for call in reversed(calls):
            if call.written or not wanted.isdisjoint(self._variables(call.made)):
                wanted |= self._variables(call.read)
                needed.append(call)
        return needed[::-1]

    def _line(self, call: _Call) -> str:
        """Write a call."""
        args = [self._written(value) for value in call.args]
        args += [f"{name}={self._written(value)}" for name, value in call.options.items()]
        op = torch.enable_grad()(call.op) if call.op in _KEEPING else call.op
        expression = f"{self._hold(op)}({', '.join(args)})"
        if isinstance(call.result, Tensor):
            return f"{self._names[id(call.result)]} = {expression}"
        # Some gradients may be None.
        made = [self._names.get(id(each), "_") for each in call.result or ()]
        return f"[{', '.join(made)}] = {expression}" if made else expression

    def _written(self, value: Any) -> str:
        """Write an argument."""
        if isinstance(value, Tensor):
            return self._read(value)
        if isinstance(value, tuple | list):
            return f"[{', '.join(map(self._written, value))}]"
        return self._hold(value)

    def _variables(self, tensors: Iterable[Tensor]) -> set[str]:
        """Return the names of those tensors that are local variables."""
        names = {self._names[id(tensor)] for tensor in tensors}
        # Values are many: `names - self._values.keys()` would iterate over all of them.
        return {name for name in names if name not in self._values}

    def _name(self, tensor: Tensor) -> None:
        """Name a local variable, unless it has a name."""
        self._names.setdefault(id(tensor), f"v{len(self._names)}")

    def _read(self, tensor: Tensor) -> str:
        """Return the name of a tensor. One that the program did not make is always the same one."""
        return self._names.get(id(tensor)) or self._hold(tensor)

    def _hold(self, value: Any) -> str:
        """Name a value that all runs share."""
        name = f"k{len(self._values)}"
        self._values[name] = value
        if isinstance(value, Tensor):
            self._names[id(value)] = name
        return name


def _same(call: _Call, changed: set[int]) -> Tensor | None:
    """Return the argument of a call that its result equals, if there is one."""
    made = call.result
    if call.written or not isinstance(made, Tensor):
        return None
    if call.op in _PRODUCTS and isinstance(call.args[1], int | float) and call.args[1] == 1:
        (factor,) = call.read
        unchanged = changed.isdisjoint((_place(made), _place(factor)))
        return factor if unchanged and _layout(made) == _layout(factor) else None
    for tensor in call.read:
        if made.data_ptr() == tensor.data_ptr() and _layout(made) == _layout(tensor):
            return tensor
    return None


def _layout(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    """Return what operations depend on besides values."""
    return tensor.shape, tensor.stride(), tensor.dtype


def _place(tensor: Tensor) -> int:
    """Return where the memory begins that a tensor shares with its views."""
    return tensor.untyped_storage().data_ptr()


def _tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors of nested sequences."""
    if isinstance(values, Tensor):
        return [values]
    found = []
    if isinstance(values, tuple | list):
        for value in values:
            if isinstance(value, Tensor):
                found.append(value)
            elif isinstance(value, tuple | list):
                found += _tensors_in(value)
    return found


class _Kind:
    """A structure without its tensors, and their layouts.

    It is part of the keys of programs, so its hash is computed once.
    """

    def __init__(self, form: Any, layouts: tuple[Any, ...]) -> None:
        self.form, self._layouts, self._hash = form, layouts, hash(layouts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, _Kind) or self._layouts != other._layouts:
            return False
        return bool(self.form == other.form)


class Apart:
    """A structure of tensors that several runs of a program get, taken apart.

    Its tensors keep their shapes and layouts.

    Parameters
    ----------
    given : nested tensors
        The structure.

    Attributes
    ----------
    given, tensors
        The structure, and its tensors.
    kind : hashable
        The same for structures with the same form, shapes and layouts.
    """

    def __init__(self, given: Any) -> None:
        self.given = given
        self.tensors: list[Tensor] = []
        form = taken_apart(given, self.tensors)
        self.kind = _Kind(form, tuple(map(_layout, self.tensors)))


@dataclass
class _Program:
    """What is known about a program.

    Attributes
    ----------
    forms : tuple
        Its arguments, without their tensors: what is the same in several runs, and what is not.
    runs : int
        How often it has run from Python.
    tape : Tape or None
        Its tape, once it was recorded.
    made : nested values
        Its results, without their tensors.
    trusted : bool
        Whether the tape has returned the same results as the program.
    refused : bool
        Whether it cannot be recorded, or its tape returned other results.
    """

    forms: tuple[Any, Any]
    runs: int = 0
    tape: Tape | None = None
    made: Any = None
    trusted: bool = False
    refused: bool = False


class Tapes:
    """Runs programs, and repeats those that come again from tapes.

    A tape is used once it has returned the same bits as the program on further inputs. A program
    whose tape has not, or that cannot be recorded, always runs from Python.

    Attributes
    ----------
    repeated : int
        How often a tape was run in place of a program.

    Examples
    --------
    >>> tapes, scaled = Tapes(), lambda factor, given: {"y": factor * given["x"]}
    >>> two, numbers = Apart(torch.tensor(2)), [{"x": torch.tensor(n)} for n in range(6)]
    >>> [tapes.carry_out("scaled", scaled, two, given)["y"].item() for given in numbers]
    [0, 2, 4, 6, 8, 10]
    >>> tapes.repeated
    2
    """

    def __init__(self) -> None:
        self.repeated = 0
        self._programs: OrderedDict[Hashable, _Program] = OrderedDict()

    def carry_out(
        self, name: Hashable, program: Callable[[Any, Given], Made], lasting: Apart, given: Given
    ) -> Made:
        """Run a program, or repeat it from its tape.

        Parameters
        ----------
        name : hashable
            Programs of the same name do the same with tensors of the same shapes.
        program : callable
            Takes two structures of tensors in dictionaries, lists and tuples, and returns one.
        lasting : Apart
            The first, which is the same in several runs, but for the values of its tensors.
        given : nested tensors
            The second, which differs from run to run.
        """
        own: list[Tensor] = []
        form = taken_apart(given, own)
        key = name, lasting.kind, tuple(map(_layout, own))
        known = self._programs.pop(key, None) or _Program((lasting.kind.form, form))
        self._programs[key] = known
        if len(self._programs) > MOST_PROGRAMS:
            self._programs.popitem(last=False)
        if known.refused or known.forms[1] != form:
            return program(lasting.given, given)
        tensors = [*lasting.tensors, *own]
        if known.tape is not None and known.trusted:
            self.repeated += 1
            return cast(Made, put_together(known.made, iter(known.tape(*tensors))))
        known.runs += 1
        if known.runs <= RUNS_BEFORE:
            return program(lasting.given, given)
        if known.tape is None:
            return _record(known, program, tensors)
        return _check(known, known.tape, program(lasting.given, given), tensors)


def _record(
    known: _Program, program: Callable[[Any, Any], Made], tensors: Sequence[Tensor]
) -> Made:
    """Run a program, and keep a tape of it if that is possible."""

    def flat(*own: Tensor) -> list[Tensor]:
        found: list[Tensor] = []
        known.made = taken_apart(program(*put_together(known.forms, iter(own))), found)
        return found

    try:
        known.tape, outputs = record(flat, tensors)
    except RuntimeError:
        # The program depends on values, or has tensors that cannot be recorded, such as sparse
        # ones. If it is wrong, it fails again.
        known.refused = True
        return program(*put_together(known.forms, iter(tensors)))
    return cast(Made, put_together(known.made, iter(outputs)))


def _check(known: _Program, tape: Tape, result: Made, tensors: Sequence[Tensor]) -> Made:
    """Run a tape, and note whether it returns the same as the program."""
    wanted: list[Tensor] = []
    form = taken_apart(result, wanted)
    known.trusted = form == known.made and _returns(tape, tensors, wanted)
    known.refused = not known.trusted
    return result


def _returns(tape: Tape, tensors: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    """Return whether a tape can be run, and returns what is wanted."""
    try:
        found = tape(*tensors)
    except RuntimeError:
        # Autograd may pass tensors that do not exist. In Python they are None, which not all
        # operations accept.
        return False
    return all(map(_identical, found, wanted))


def _identical(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same layout and values; NaN equals NaN."""
    return _layout(one) == _layout(other) and torch.equal(
        torch.nan_to_num(one, nan=0.0) if one.is_floating_point() else one,
        torch.nan_to_num(other, nan=0.0) if other.is_floating_point() else other,
    )
