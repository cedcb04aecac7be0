"""A pickle read as data: an interpreter of its opcodes that makes plain values and calls nothing but a short
list of functions of ours.

Python's own unpickler imports and calls what a pickle names, and takes memory that a few bytes ask for (a
memo of 2^32 places, say). Here a name is looked up in a table, and a name that is not there ends the
reading with that name; dictionaries stay lists of pairs, so that no key of a stranger is hashed; every
opcode is charged for what it may cost. Opcodes: the binary ones of protocols 2 to 5 (CPython's
Lib/pickletools.py describes each).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from nobounce.errors import clip

MOST_DIGITS = 16
"""Bytes of the longest integer."""


class BadPickleError(ValueError):
    """A pickle that makes no sense, or more than is read. `offset` counts bytes of the pickle."""

    def __init__(self, reason: str, offset: int = 0) -> None:
        super().__init__(reason)
        self.reason, self.offset = reason, offset


class Pairs:
    """A dictionary, of whatever class: its keys and values in order."""

    __slots__ = ("pairs",)

    def __init__(self) -> None:
        self.pairs: list[tuple[Any, Any]] = []


class Name(NamedTuple):
    """Something that a pickle names: a function or class of the table, `call` being ours, or a
    value that stands for itself."""

    text: str
    call: Callable[[tuple[Any, ...]], Any] | None = None


def unpickle(raw: bytes, names: Mapping[str, Name], persistent: Callable[[Any], Any], room: int) -> Any:
    """The value of a pickle. `names` are what it may name ("collections.OrderedDict"), `persistent` makes
    the value of a persistent id, `room` bounds the memory in bytes. Raises BadPickleError, also where a
    function of the table does.
    """
    machine = _Machine(raw, names, persistent)
    steps, costs, data = _STEPS, _COSTS, raw
    try:
        while True:
            op = data[machine.at]
            machine.at += 1
            if op == _STOP:
                return machine.stack.pop()
            room -= costs[op]
            if room < machine.spent:
                raise BadPickleError("needs more memory than a file of its size may", machine.at)
            step = steps[op]
            if step is None:
                raise BadPickleError(
                    f"holds the opcode {bytes([op])!r}, which no checkpoint needs", machine.at - 1
                )
            step(machine)
    except (IndexError, struct.error):
        raise BadPickleError("is damaged or cut off", machine.at) from None
    except KeyError:
        raise BadPickleError("refers to a value that it has not made", machine.at) from None
    except BadPickleError as error:
        raise BadPickleError(error.reason, error.offset or machine.at) from None
    except ValueError:
        raise BadPickleError("has text that is none, or that does not end", machine.at) from None


class _Machine:
    """The stack, the marked stacks below it, the memo. `spent` is memory beyond what `_COSTS` charge."""

    __slots__ = ("at", "marked", "memo", "names", "persistent", "raw", "spent", "stack")

    def __init__(self, raw: bytes, names: Mapping[str, Name], persistent: Callable[[Any], Any]) -> None:
        self.raw, self.names, self.persistent = raw, names, persistent
        self.at = self.spent = 0
        self.stack: list[Any] = []
        self.marked: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def take(self, nbytes: int) -> bytes:
        """The next bytes."""
        at = self.at
        if at + nbytes > len(self.raw):
            raise IndexError
        self.at = at + nbytes
        return self.raw[at : self.at]

    def number(self, nbytes: int) -> int:
        """An unsigned number of so many bytes."""
        return int.from_bytes(self.take(nbytes), "little")

    def text(self, nbytes: int) -> bytes:
        """Bytes that are charged for."""
        self.spent += 4 * nbytes  # as text they may take four bytes a character
        return self.take(nbytes)

    def from_mark(self) -> list[Any]:
        """What lies above the last mark."""
        items, self.stack = self.stack, self.marked.pop()
        return items

    # what is on the stack

    def mark(self) -> None:
        self.marked.append(self.stack)
        self.stack = []

    def pop(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.from_mark()

    def pop_mark(self) -> None:
        self.from_mark()

    def double(self) -> None:
        self.stack.append(self.stack[-1])

    def frame(self) -> None:
        self.take(8)

    def protocol(self) -> None:
        version = self.raw[self.at]
        self.at += 1
        if version > 5:
            raise BadPickleError(f"is of protocol {version}; those up to 5 are read")

    # the memo

    def put(self) -> None:
        self.memo[self.raw[self.at]] = self.stack[-1]
        self.at += 1

    def put_long(self) -> None:
        self.memo[self.number(4)] = self.stack[-1]

    def memoize(self) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def get(self) -> None:
        self.stack.append(self.memo[self.raw[self.at]])
        self.at += 1

    def get_long(self) -> None:
        self.stack.append(self.memo[self.number(4)])

    # plain values

    def signed(self) -> None:
        self.stack.append(int.from_bytes(self.take(4), "little", signed=True))

    def byte(self) -> None:
        self.stack.append(self.raw[self.at])
        self.at += 1

    def long(self) -> None:
        self._long(self.number(1))

    def longer(self) -> None:
        self._long(self.number(4))

    def _long(self, nbytes: int) -> None:
        if nbytes > MOST_DIGITS:
            raise BadPickleError(f"holds an integer of {nbytes} bytes")
        self.stack.append(int.from_bytes(self.take(nbytes), "little", signed=True))

    def make_float(self) -> None:
        self.stack.append(struct.unpack(">d", self.take(8))[0])

    # containers

    def make_tuple(self) -> None:
        items = tuple(self.from_mark())
        self.stack.append(items)

    def some(self, count: int) -> None:
        """A tuple of the last values."""
        if count > len(self.stack):
            raise IndexError
        self.stack[-count:] = [tuple(self.stack[-count:])]

    def make_list(self) -> None:
        items = self.from_mark()
        self.stack.append(items)

    def append(self) -> None:
        item = self.stack.pop()
        self._list().append(item)

    def extend(self) -> None:
        items = self.from_mark()
        self._list().extend(items)

    def _list(self) -> Any:
        if type(self.stack[-1]) is not list:
            raise BadPickleError("adds to something that is no list")
        return self.stack[-1]

    def make_dict(self) -> None:
        items = self.from_mark()
        self.stack.append(Pairs())
        self._set(items)

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def set_items(self) -> None:
        self._set(self.from_mark())

    def _set(self, items: Any) -> None:
        if not isinstance(self.stack[-1], Pairs):
            raise BadPickleError("sets an item of something that is no dictionary")
        self.spent += 32 * len(items)
        self.stack[-1].pairs.extend(zip(items[::2], items[1::2], strict=False))
        if len(items) % 2:
            raise BadPickleError("has a key without a value")

    # names and what they make

    def name(self) -> None:
        end = self.raw.index(b"\n", self.at)
        last = self.raw.index(b"\n", end + 1)
        self._name(self.raw[self.at : end].decode(), self.raw[end + 1 : last].decode())
        self.at = last + 1

    def name_from_stack(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str:
            raise BadPickleError("names something by no text")
        self._name(module, name)

    def _name(self, module: str, name: str) -> None:
        text = f"{'builtins' if module == '__builtin__' else module}.{name}"
        found = self.names.get(text)
        if found is None:
            raise BadPickleError(
                f"holds {clip(text, 100)!r}; only tensors of known types, containers and plain values are "
                "read"
            )
        self.stack.append(found)

    def reduce(self) -> None:
        arguments, name = self.stack.pop(), self.stack.pop()
        if type(name) is not Name or name.call is None or type(arguments) is not tuple:
            what = name.text if type(name) is Name else f"a {type(name).__name__}"
            raise BadPickleError(f"calls {clip(what, 100)!r}, which makes no tensor and no container")
        self.stack.append(name.call(arguments))

    def build(self) -> None:
        """The attributes of a dictionary (`_metadata` of a state_dict) are nothing that is loaded."""
        self.stack.pop()
        if not isinstance(self.stack[-1], Pairs):
            raise BadPickleError("sets attributes of something that is no dictionary")

    def persist(self) -> None:
        self.stack.append(self.persistent(self.stack.pop()))


_STOP = ord(".")
_Step = Callable[[_Machine], None]


def _constant(value: Any) -> _Step:
    return lambda m: m.stack.append(value)


def _made(make: Callable[[], Any]) -> _Step:
    return lambda m: m.stack.append(make())


def _unsigned(nbytes: int) -> _Step:
    return lambda m: m.stack.append(m.number(nbytes))


def _text(length: int, decode: bool) -> _Step:
    """A string or bytes behind a length of so many bytes."""

    def step(m: _Machine) -> None:
        raw = m.text(m.number(length))
        m.stack.append(raw.decode("utf-8", "surrogatepass") if decode else raw)

    return step


def _last(count: int) -> _Step:
    return lambda m: m.some(count)


_M = _Machine
_OPCODES: dict[bytes, tuple[_Step, int]] = {
    b"\x80": (_M.protocol, 8), b"\x95": (_M.frame, 8), b"(": (_M.mark, 80), b"0": (_M.pop, 8),
    b"1": (_M.pop_mark, 8), b"2": (_M.double, 16), b"N": (_constant(None), 16),
    b"\x88": (_constant(True), 16), b"\x89": (_constant(False), 16), b"J": (_M.signed, 48),
    b"K": (_M.byte, 16), b"M": (_unsigned(2), 48), b"\x8a": (_M.long, 60), b"\x8b": (_M.longer, 60),
    b"G": (_M.make_float, 40), b"X": (_text(4, True), 90), b"\x8c": (_text(1, True), 90),
    b"\x8d": (_text(8, True), 90), b"U": (_text(1, True), 90), b"T": (_text(4, True), 90),
    b"B": (_text(4, False), 60), b"C": (_text(1, False), 60), b"\x8e": (_text(8, False), 60),
    b"\x96": (_text(8, False), 60), b")": (_constant(()), 16), b"t": (_M.make_tuple, 70),
    b"\x85": (_last(1), 70), b"\x86": (_last(2), 70), b"\x87": (_last(3), 70), b"]": (_made(list), 100),
    b"l": (_M.make_list, 100), b"a": (_M.append, 16), b"e": (_M.extend, 16), b"}": (_made(Pairs), 130),
    b"d": (_M.make_dict, 130), b"s": (_M.set_item, 80), b"u": (_M.set_items, 80), b"\x8f": (_made(list), 100),
    b"\x90": (_M.extend, 16), b"\x91": (_M.make_list, 100), b"c": (_M.name, 16),
    b"\x93": (_M.name_from_stack, 16), b"R": (_M.reduce, 200), b"\x81": (_M.reduce, 200), b"b": (_M.build, 8),
    b"Q": (_M.persist, 200), b"q": (_M.put, 110), b"r": (_M.put_long, 140), b"\x94": (_M.memoize, 140),
    b"h": (_M.get, 16), b"j": (_M.get_long, 16),
}  # fmt: skip
"""What each opcode does, and the bytes of memory that it is charged."""

_STEPS: list[_Step | None] = [
    _OPCODES[bytes([op])][0] if bytes([op]) in _OPCODES else None for op in range(256)
]
_COSTS = [_OPCODES[bytes([op])][1] if bytes([op]) in _OPCODES else 0 for op in range(256)]
