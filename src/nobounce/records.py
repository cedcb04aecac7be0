"""Records: what `dataclass(frozen=True, slots=True)` makes, without its price at import.

`dataclasses` imports `inspect` (5 ms) and compiles six functions for each class (0.5 ms), of which a process
uses few. A record's `__init__` is compiled when the first one is made, and its other methods are shared.
`dataclasses.fields`, `replace`, `asdict` and `is_dataclass` take a record for the dataclass that it stands
for; type checkers do by PEP 681. Inside this package `replace` of this module is used, which imports nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, TypeVar, cast, dataclass_transform, overload

T = TypeVar("T")


class _Factory:
    """A default that is made anew for each record."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make


def field(*, default_factory: Callable[[], T]) -> T:
    """A field whose default is what `default_factory` returns, as in `dataclasses`."""
    return cast(T, _Factory(default_factory))


class _Init:
    """Stands for `__init__` until it is first needed, and then compiles it into the class."""

    __slots__ = ("_cls", "_defaults")

    def __init__(self, defaults: dict[str, Any]) -> None:
        self._defaults = defaults

    def __set_name__(self, owner: type, name: str) -> None:
        self._cls = owner

    def __get__(self, record: object, owner: type) -> Any:
        cls, defaults = self._cls, self._defaults
        init = _compile(cls, defaults)
        cls.__init__ = init  # type: ignore[misc]
        return init if record is None else init.__get__(record, owner)


def _compile(cls: type, defaults: dict[str, Any]) -> Any:
    """`__init__` of all fields. It sets the slots by their descriptors, which a
    frozen class does not refuse."""
    names = cls.__match_args__  # type: ignore[attr-defined]
    space: dict[str, Any] = {"_MISSING": _MISSING, "__name__": cls.__module__}
    parameters, lines = ["self"], []
    for name in names:
        space[f"_set_{name}"] = cls.__dict__[name].__set__
        value = name
        if name in defaults:
            default = defaults[name]
            made = isinstance(default, _Factory)
            space[f"_default_{name}"] = default.make if made else default
            parameters.append(f"{name}=_MISSING" if made else f"{name}=_default_{name}")
            if made:
                value = f"_default_{name}() if {name} is _MISSING else {name}"
        else:
            parameters.append(name)
        lines.append(f" _set_{name}(self, {value})")
    if hasattr(cls, "__post_init__"):
        lines.append(" self.__post_init__()")
    exec(f"def __init__({', '.join(parameters)}):\n" + "\n".join(lines), space)
    init = space["__init__"]
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    init.__annotations__ = {name: cls.__annotations__[name] for name in names} | {"return": None}
    return init


class _Missing:
    def __repr__(self) -> str:
        return "<factory>"


_MISSING = _Missing()


class _Fields:
    """`__dataclass_fields__`, made when it is asked for."""

    __slots__ = ("_defaults", "_made")

    def __init__(self, defaults: dict[str, Any]) -> None:
        self._defaults = defaults
        self._made: dict[str, Any] | None = None

    def __get__(self, record: object, owner: Any) -> dict[str, Any]:
        fields = self._made
        if fields is None:
            import dataclasses

            rows: list[Any] = []
            for name in owner.__match_args__:
                shown = not name.startswith("_")
                options: dict[str, Any] = {"repr": shown, "compare": shown}
                if name in self._defaults:
                    default = self._defaults[name]
                    made = isinstance(default, _Factory)
                    options["default_factory" if made else "default"] = default.make if made else default
                rows.append((name, owner.__annotations__[name], dataclasses.field(**options)))
            made_class: Any = dataclasses.make_dataclass(owner.__name__, rows)
            fields = self._made = dict(made_class.__dataclass_fields__)
        return fields


def _repr(self: Any) -> str:
    shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self._compared)
    return f"{type(self).__qualname__}({shown})"


def _eq(self: Any, other: Any) -> Any:
    if other.__class__ is not self.__class__:
        return NotImplemented
    values = self._values
    return values(self) == values(other)


def _hash(self: Any) -> int:
    return hash(self._values(self))


def _setattr(self: Any, name: str, value: object) -> None:
    from dataclasses import FrozenInstanceError

    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _delattr(self: Any, name: str) -> None:
    from dataclasses import FrozenInstanceError

    raise FrozenInstanceError(f"cannot delete field {name!r}")


def _getstate(self: Any) -> list[Any]:
    return [getattr(self, name) for name in self.__match_args__]


def _setstate(self: Any, state: list[Any]) -> None:
    for name, value in zip(self.__match_args__, state, strict=True):
        object.__setattr__(self, name, value)


def replace(record: T, /, **changes: Any) -> T:
    """A copy of `record` with some fields changed. TypeError for a name that is no field."""
    fields: Any = record
    for name in fields.__match_args__:
        if name not in changes:
            changes[name] = getattr(record, name)
    return type(record)(**changes)


@overload
def record(cls: type[T], /) -> type[T]: ...


@overload
def record(*, frozen: bool = True) -> Callable[[type[T]], type[T]]: ...


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(cls: Any = None, /, *, frozen: bool = True) -> Any:
    """A class of named, typed fields in slots: compared, hashed and printed by its fields, unless their names
    begin with an underscore.

    With `frozen=False` fields may be set, and a record equals itself alone.
    """
    return _build(cls, frozen) if cls is not None else lambda cls: _build(cls, frozen)


def _build(cls: Any, frozen: bool) -> Any:
    space = dict(cls.__dict__)
    names = tuple(space["__annotations__"])
    defaults = {name: space.pop(name) for name in names if name in space}
    space.pop("__dict__", None)
    space.pop("__weakref__", None)
    shown = tuple(name for name in names if not name.startswith("_"))
    space |= {"__slots__": names, "__match_args__": names, "_compared": shown}
    space |= {"__init__": _Init(defaults), "__dataclass_fields__": _Fields(defaults)}
    methods: dict[str, Any] = {"__repr__": _repr, "__getstate__": _getstate, "__setstate__": _setstate}
    methods["__replace__"] = replace
    if frozen:
        space["_values"] = staticmethod(attrgetter(*shown))
        methods |= {"__eq__": _eq, "__hash__": _hash, "__setattr__": _setattr, "__delattr__": _delattr}
    return type(cls)(cls.__name__, cls.__bases__, {**methods, **space})
