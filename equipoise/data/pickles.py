"""Pickles of arrays, text, numbers, lists and dictionaries, read without Python's own unpickler.

A pickle is a program: it names functions and the arguments to call them with. Even a reader that
allows only NumPy's array functions lets a file choose their arguments, and some arguments make
NumPy access memory outside its buffers. Therefore this reader calls no function. A small stack
machine executes the few instructions that such files need. It checks the type, shape and bytes of
each array and then creates the array from its bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from math import prod
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from equipoise.errors import InputError

_RECONSTRUCT = {(f"{home}.multiarray", "_reconstruct") for home in ("numpy.core", "numpy._core")}
_FROM_BUFFER = {(f"{home}.numeric", "_frombuffer") for home in ("numpy.core", "numpy._core")}
_ARRAY, _TYPE, _ENCODE = ("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")
_KNOWN = {*_RECONSTRUCT, *_FROM_BUFFER, _ARRAY, _TYPE, _ENCODE}
# Whole numbers, floating point numbers and truth values, by the codes that NumPy writes.
_TYPES = {
    f"{kind}{size}"
    for kind, sizes in (("u", "1248"), ("i", "1248"), ("f", "248"), ("b", "1"))
    for size in sizes
}
_LONGEST_WHOLE_NUMBER = 8
_MOST_AXES = 32


@dataclass(frozen=True)
class _Function:
    """A function that a pickle names; it is never called."""

    home: str
    name: str

    @property
    def key(self) -> tuple[str, str]:
        return self.home, self.name


@dataclass
class _Type:
    """A number type. Its byte order is set by its state."""

    code: str
    order: str = "|"

    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.order + self.code)


@dataclass
class _Array:
    """An array. Its values are set by its state."""

    values: NDArray[Any] | None = None


@dataclass
class _Machine:
    """A stack machine that executes the instructions of a pickle."""

    content: bytes
    position: int = 0
    stack: list[Any] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)
    made: int = 0

    # ---- bytes -----------------------------------------------------------------------------------

    def take(self, count: int) -> bytes:
        end = self.position + count
        if not 0 <= count <= len(self.content) - self.position:
            raise ValueError("it ends too early")
        taken = self.content[self.position : end]
        self.position = end
        return taken

    def number(self, form: str) -> Any:
        value = struct.unpack(form, self.take(struct.calcsize(form)))[0]
        return value

    def line(self) -> bytes:
        end = self.content.find(b"\n", self.position)
        if end < 0:
            raise ValueError("it ends too early")
        return self.take(end + 1 - self.position)[:-1]

    # ---- the stack -------------------------------------------------------------------------------

    def pop(self) -> Any:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise ValueError("an instruction finds nothing to work on")
        return self.stack.pop()

    def top(self, kind: type) -> Any:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0) or not isinstance(
            self.stack[-1], kind
        ):
            raise ValueError(f"an instruction finds no {kind.__name__} to work on")
        return self.stack[-1]

    def since_mark(self) -> list[Any]:
        if not self.marks:
            raise ValueError("an instruction finds no mark")
        begin = self.marks.pop()
        items = self.stack[begin:]
        del self.stack[begin:]
        return items

    def last(self, count: int) -> tuple[Any, ...]:
        return tuple(reversed([self.pop() for _ in range(count)]))

    def put(self, number: int) -> None:
        # A dictionary, because a damaged file may use huge positions.
        self.memo[number] = self.top(object)

    def get(self, number: int) -> None:
        if number not in self.memo:
            raise ValueError(f"it refers to value {number}, which does not exist")
        self.stack.append(self.memo[number])

    # ---- values ----------------------------------------------------------------------------------

    def function(self, home: Any, name: Any) -> None:
        if not (isinstance(home, str) and isinstance(name, str)) or (home, name) not in _KNOWN:
            _refuse(f"it asks for {home}.{name}, which files of CIFAR have no use for")
        self.stack.append(_Function(home, name))

    def set_items(self, items: list[Any]) -> None:
        into = self.top(dict)
        if len(items) % 2:
            raise ValueError("a key has no value")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | bytes | int):
                raise ValueError(f"a key is a {type(key).__name__}")
            into[key] = value

    def call(self) -> None:
        function, arguments = self.last(2)
        if not isinstance(function, _Function) or not isinstance(arguments, tuple):
            raise ValueError("it calls something that is not a function")
        if function.key in _RECONSTRUCT:
            # The arguments are the class and a placeholder shape and type. The state has the real
            # ones.
            if not arguments or arguments[0] != _Function(*_ARRAY):
                _refuse("it asks for an array of another class")
            self.stack.append(_Array())
        elif function.key in _FROM_BUFFER:
            buffer, kind, shape, order = _exactly(arguments, 4)
            self.stack.append(_Array(self.values(buffer, kind, shape, order in ("F", b"F"))))
        elif function.key == _TYPE:
            self.stack.append(_Type(_code(arguments)))
        elif function.key == _ENCODE:
            text, encoding = _exactly(arguments, 2)
            if encoding != "latin1":
                _refuse(f"it asks for the encoding {encoding!r}")
            self.stack.append(self.counted(_text(text).encode("latin1")))
        else:
            _refuse("it asks for an array with other arguments")

    def values(self, content: Any, kind: Any, shape: Any, by_columns: bool) -> NDArray[Any]:
        if not isinstance(content, bytes):
            raise ValueError("an array has no bytes")
        return _values(self.counted(content), kind, shape, by_columns)

    def counted(self, content: bytes) -> bytes:
        """Refuse a file that expands one large value to many by repeated references."""
        self.made += len(content)
        if self.made > 2 * len(self.content):
            _refuse("its values are larger than the file itself")
        return content

    def build(self) -> None:
        state = self.pop()
        into = self.top(object)
        if not isinstance(state, tuple):
            raise ValueError("a state is not a tuple")
        if isinstance(into, _Type):
            into.order = _order(state)
        elif isinstance(into, _Array) and into.values is None:
            _, shape, kind, by_columns, content = _exactly(state, 5)
            into.values = self.values(content, kind, shape, bool(by_columns))
        else:
            raise ValueError("it gives a state to a value that has none")

    # ---- instructions ----------------------------------------------------------------------------

    def run(self) -> Any:
        """Execute all instructions and return the remaining value."""
        while True:
            code = self.take(1)
            if code == b".":
                break
            if code not in _INSTRUCTIONS:
                raise ValueError(f"instruction {code!r} is none that arrays, text and numbers need")
            _INSTRUCTIONS[code](self)
        if len(self.stack) != 1 or self.marks:
            raise ValueError("it leaves no single value")
        return self.stack[0]


def loads(content: bytes) -> Any:
    """Read a pickle of arrays, text, numbers, lists and dictionaries.

    Parameters
    ----------
    content : bytes
        The pickle, of any protocol. Text written by Python 2 comes back as bytes.

    Returns
    -------
    object
        The stored value. Arrays may be the value itself or values of a dictionary, but not nested
        deeper.

    Raises
    ------
    InputError
        If it asks for anything else.
    ValueError
        If it is damaged.

    Examples
    --------
    >>> import pickle
    >>> loads(pickle.dumps({b"data": np.arange(3), b"labels": [6, 9]}))
    {b'data': array([0, 1, 2]), b'labels': [6, 9]}
    """
    found = _Machine(content).run()
    if isinstance(found, dict):
        return {key: _finished(value) for key, value in found.items()}
    return _finished(found)


def _finished(value: Any) -> Any:
    if isinstance(value, _Function | _Type):
        _refuse("it holds a function, which files of CIFAR have no use for")
    if not isinstance(value, _Array):
        return value
    if value.values is None:
        raise ValueError("an array has no values")
    return value.values


def _refuse(reason: str) -> NoReturn:
    raise InputError(reason)


def _exactly(values: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    if len(values) != count:
        raise ValueError(f"{count} values are needed, and there are {len(values)}")
    return values


def _text(value: Any) -> str:
    if not isinstance(value, str | bytes):
        raise ValueError(f"text is needed, and there is a {type(value).__name__}")
    return value if isinstance(value, str) else value.decode("ascii")


def _code(arguments: tuple[Any, ...]) -> str:
    code = _text(arguments[0] if arguments else b"").lstrip("|<>=")
    if code not in _TYPES:
        _refuse(f"it asks for an array of {code!r}, which is not a number type")
    return code


def _order(state: tuple[Any, ...]) -> str:
    order = _text(state[1]) if len(state) > 1 else "|"
    # Names and shapes of fields, and further options. Number types have none.
    if order not in ("|", "<", ">", "=") or any(part is not None for part in state[2:5]):
        _refuse("it asks for a type that is not a number type")
    return order


def _values(content: bytes, kind: Any, shape: Any, by_columns: bool) -> NDArray[Any]:
    """Create an array from its bytes, whose number must match its type and shape."""
    axes = (shape,) if isinstance(shape, int) else shape
    if (
        not isinstance(axes, tuple)
        or len(axes) > _MOST_AXES
        or not all(type(n) is int and n >= 0 for n in axes)
    ):
        raise ValueError("an array has an invalid shape")
    if not isinstance(kind, _Type):
        raise ValueError("an array has no type")
    dtype = kind.dtype()
    if prod(axes) * dtype.itemsize != len(content):
        raise ValueError(
            f"an array has {len(content)} bytes, its shape {axes} needs "
            f"{prod(axes) * dtype.itemsize}"
        )
    return np.frombuffer(content, dtype).reshape(axes, order="F" if by_columns else "C").copy()


def _pushing(read: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(read(machine))


def _counted(form: str) -> Callable[[_Machine], bytes]:
    return lambda machine: machine.take(machine.number(form))


def _utf8(form: str) -> Callable[[_Machine], str]:
    return lambda machine: machine.take(machine.number(form)).decode("utf-8", "surrogatepass")


def _whole_number(machine: _Machine) -> Any:
    line = machine.line()
    # Protocol 0 writes truth values as numbers of two digits, and large numbers with a final L.
    if line in (b"00", b"01"):
        return line == b"01"
    digits = line.removesuffix(b"L")
    if not digits.removeprefix(b"-").isdigit() or len(digits) > 18:
        raise ValueError("a whole number has no or too many digits")
    return int(digits)


def _long(machine: _Machine) -> int:
    size = machine.number("<B")
    if size > _LONGEST_WHOLE_NUMBER:
        raise ValueError("a whole number has too many digits")
    return int.from_bytes(machine.take(size), "little", signed=True)


def _quoted(machine: _Machine) -> bytes:
    """Read text of Python 2 in quotation marks."""
    line = machine.line()
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
        raise ValueError("text lacks its quotation marks")
    return line[1:-1].decode("unicode_escape").encode("latin1")


def _append(machine: _Machine) -> None:
    value = machine.pop()
    machine.top(list).append(value)


def _appends(machine: _Machine) -> None:
    values = machine.since_mark()
    machine.top(list).extend(values)


def _dictionary(machine: _Machine) -> None:
    items = machine.since_mark()
    machine.stack.append({})
    machine.set_items(items)


def _set_item(machine: _Machine) -> None:
    machine.set_items(list(machine.last(2)))


def _stack_global(machine: _Machine) -> None:
    home, name = machine.last(2)
    machine.function(home, name)


def _named(machine: _Machine) -> None:
    home, name = machine.line().decode("ascii"), machine.line().decode("ascii")
    machine.function(home, name)


def _skipping(count: int) -> Callable[[_Machine], None]:
    """Return a handler that skips an instruction and its ``count`` bytes."""

    def skip(machine: _Machine) -> None:
        machine.take(count)

    return skip


# Keyed by opcode; `pickletools` describes each.
_INSTRUCTIONS: dict[Hashable, Callable[[_Machine], None]] = {
    b"\x80": _skipping(1),  # the protocol
    b"\x95": _skipping(8),  # a frame
    b"\x98": _skipping(0),  # a read-only buffer
    b"(": lambda machine: machine.marks.append(len(machine.stack)),
    b"N": _pushing(lambda machine: None),
    b"\x88": _pushing(lambda machine: True),
    b"\x89": _pushing(lambda machine: False),
    b"K": _pushing(lambda machine: machine.number("<B")),
    b"M": _pushing(lambda machine: machine.number("<H")),
    b"J": _pushing(lambda machine: machine.number("<i")),
    b"I": _pushing(_whole_number),
    b"L": _pushing(_whole_number),
    b"\x8a": _pushing(_long),
    b"F": _pushing(lambda machine: float(machine.line())),
    b"G": _pushing(lambda machine: machine.number(">d")),
    b"U": _pushing(_counted("<B")),
    b"T": _pushing(_counted("<I")),
    b"S": _pushing(_quoted),
    b"C": _pushing(_counted("<B")),
    b"B": _pushing(_counted("<I")),
    b"\x8e": _pushing(_counted("<Q")),
    b"\x96": _pushing(_counted("<Q")),
    b"V": _pushing(lambda machine: machine.line().decode("raw_unicode_escape")),
    b"X": _pushing(_utf8("<I")),
    b"\x8c": _pushing(_utf8("<B")),
    b"\x8d": _pushing(_utf8("<Q")),
    b"]": _pushing(lambda machine: []),
    b"}": _pushing(lambda machine: {}),
    b")": _pushing(lambda machine: ()),
    b"l": _pushing(_Machine.since_mark),
    b"t": _pushing(lambda machine: tuple(machine.since_mark())),
    b"\x85": _pushing(lambda machine: machine.last(1)),
    b"\x86": _pushing(lambda machine: machine.last(2)),
    b"\x87": _pushing(lambda machine: machine.last(3)),
    b"d": _dictionary,
    b"a": _append,
    b"e": _appends,
    b"s": _set_item,
    b"u": lambda machine: machine.set_items(machine.since_mark()),
    b"q": lambda machine: machine.put(machine.number("<B")),
    b"r": lambda machine: machine.put(machine.number("<I")),
    b"p": lambda machine: machine.put(_whole_number(machine)),
    b"\x94": lambda machine: machine.put(len(machine.memo)),
    b"h": lambda machine: machine.get(machine.number("<B")),
    b"j": lambda machine: machine.get(machine.number("<I")),
    b"g": lambda machine: machine.get(_whole_number(machine)),
    b"c": _named,
    b"\x93": _stack_global,
    b"R": _Machine.call,
    b"b": _Machine.build,
}
