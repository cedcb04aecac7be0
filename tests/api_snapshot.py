"""The public API as text: every name, signature, base class and member. `make api` writes it to tests/unit/public_api.txt.

Members count wherever nobounce defines them, private bases included; what Python's own classes bring does not.
"""

from __future__ import annotations

import enum
import inspect
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nobounce

SNAPSHOT = Path(__file__).parent / "unit" / "public_api.txt"

# What Python or a decorator writes into a class, and what only says how an object prints or compares.
_NOT_API = frozenset(vars(object)) | {
    "__abstractmethods__",
    "__annotate__",
    "__annotate_func__",
    "__annotations__",
    "__annotations_cache__",
    "__dataclass_fields__",
    "__dataclass_params__",
    "__del__",
    "__dict__",
    "__firstlineno__",
    "__getstate__",
    "__match_args__",
    "__orig_bases__",
    "__parameters__",
    "__replace__",
    "__setstate__",
    "__slotnames__",  # copyreg's, once one has been pickled
    "__slots__",
    "__static_attributes__",
    "__type_params__",
    "__weakref__",
}


def snapshot() -> str:
    """The API of the package that is imported, one name a line, members indented."""
    return "".join(
        f"{line}\n" for name in nobounce.__all__ for line in _describe(name, getattr(nobounce, name))
    )


def _describe(name: str, thing: Any) -> Iterator[str]:
    if isinstance(thing, types.UnionType):
        yield f"{name} = {thing}"
        return
    if not inspect.isclass(thing):
        yield f"{name}{_signature(thing)}" if callable(thing) else f"{name}: {type(thing).__name__}"
        return
    bases = ", ".join(b.__name__ for b in thing.__bases__ if b is not object)
    yield f"class {name}({bases})" if bases else f"class {name}"
    ours = [c for c in thing.__mro__ if c.__module__.partition(".")[0] == "nobounce"]
    if issubclass(thing, enum.Enum):
        yield from (f"    {member} = {value.value!r}" for member, value in thing.__members__.items())
    elif any(made in vars(c) for c in ours for made in ("__init__", "__new__")):
        yield f"    {_signature(thing)}"
    yield from sorted(_members(thing, ours))


def _members(thing: type, ours: list[type]) -> Iterator[str]:
    seen = set(thing.__members__) if issubclass(thing, enum.Enum) else set()
    for owner in ours:
        annotations = inspect.get_annotations(owner)
        for name in [*annotations, *vars(owner)]:
            private = name.startswith("_") and not (name.startswith("__") and name.endswith("__"))
            if private or name in _NOT_API or name in seen:
                continue
            seen.add(name)
            value = inspect.getattr_static(owner, name, None)
            yield f"    {_member(name, value, annotations.get(name))}"


def _member(name: str, value: Any, annotation: Any) -> str:
    if isinstance(value, property):
        result = inspect.signature(value.fget).return_annotation if value.fget else Any
        return f"{name}: {_text(result)} (property{', settable' if value.fset else ''})"
    for kind in (staticmethod, classmethod):
        if isinstance(value, kind):
            return f"{name}{_signature(value.__func__)} ({kind.__name__})"
    if inspect.isfunction(value):
        return f"{name}{_signature(value)}"
    return f"{name}: {_text(annotation) if annotation is not None else type(value).__name__}"


def _signature(thing: Any) -> str:
    found = inspect.signature(thing)
    words: list[str] = []
    kinds = [p.kind for p in found.parameters.values()]
    for index, parameter in enumerate(found.parameters.values()):
        kind = parameter.kind
        if kind is parameter.KEYWORD_ONLY and not {parameter.VAR_POSITIONAL, parameter.KEYWORD_ONLY} & set(
            kinds[:index]
        ):
            words.append("*")
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(kind, "")
        typed = "" if parameter.annotation is parameter.empty else f": {_text(parameter.annotation)}"
        default = "" if parameter.default is parameter.empty else f" = {_stable(parameter.default)}"
        words.append(f"{stars}{parameter.name}{typed}{default}")
        if kind is parameter.POSITIONAL_ONLY and kinds[index + 1 : index + 2] != [parameter.POSITIONAL_ONLY]:
            words.append("/")
    empty = found.return_annotation is inspect.Signature.empty
    return f"({', '.join(words)})" + ("" if empty else f" -> {_text(found.return_annotation)}")


def _text(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _stable(default: Any) -> str:
    text = repr(default)
    if re.search(r"\bat 0x[0-9a-f]+", text):
        raise ValueError(f"default {text} prints differently in each process")
    return text


if __name__ == "__main__":
    SNAPSHOT.write_text(snapshot(), encoding="utf-8")
    sys.stdout.write(f"{SNAPSHOT}: {len(nobounce.__all__)} names\n")
