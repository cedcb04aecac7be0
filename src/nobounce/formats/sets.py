"""Models of other formats than safetensors in a folder, and models split into numbered files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence

from nobounce.errors import FormatError, counted
from nobounce.formats.tensorinfo import Header

INDEX_SUFFIX = ".bin.index.json"
"""Of the index of a PyTorch checkpoint in several files."""
_SUFFIXES = (".gguf", ".bin", ".pt", ".pth", ".ckpt", ".npz")
_NUMBERED = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})(\.[a-z]+)")
_MAIN = "pytorch_model.bin"
"""The model among the .bin, .pt and .pth files that training leaves in a folder
(huggingface.co/docs/transformers)."""


def numbered(name: str) -> list[str]:
    """Every file that a name such as "m-00001-of-00003.gguf" promises; none where it has no such numbers."""
    found = _NUMBERED.fullmatch(name)
    if found is None:
        return []
    prefix, _, total, suffix = found.groups()
    return [f"{prefix}-{number:05d}-of-{total}{suffix}" for number in range(1, int(total) + 1)]


def models_among(names: Iterable[str], folder: str) -> dict[str, list[str]]:
    """The models among the files of a folder: how a message names each, and its files in
    order, missing ones too."""
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.startswith(".") or not name.endswith((*_SUFFIXES, INDEX_SUFFIX)):
            continue
        if os.path.isdir(f"{folder}/{name}"):
            continue
        first = _NUMBERED.sub(r"\1-00001-of-\3\4", name)
        if first not in found:
            found[first] = numbered(name) or [name]
    main = next((n for n in found if n.endswith(INDEX_SUFFIX)), _MAIN if _MAIN in found else None)
    if main is not None:
        # Its shards, and what else of torch lies beside it, are no models of their own.
        found = {n: f for n, f in found.items() if n == main or n.endswith((".gguf", ".npz"))}
    return found


def first_of_split(path: str) -> list[str]:
    """The files of a split GGUF whose first one is at `path`; none where the path is no such file."""
    folder, name = os.path.split(path)
    files = numbered(name) if name.endswith(".gguf") else []
    if len(files) < 2 or files[0] != name:
        return []
    return [os.path.join(folder, file) for file in files]


def verify_split(headers: Sequence[Header]) -> tuple[str, ...]:
    """Check that the files of a split GGUF belong together and are all there; warnings. Pure.

    FormatError where the keys split.no, split.count and split.tensors.count of several files say otherwise. A
    split that is loaded alone is warned of.
    """
    if not any("split.count" in h.metadata for h in headers if h.format == "GGUF"):
        return ()
    total = _number(headers[0], "split.count")
    if len(headers) == 1:
        if total is None or total < 2:
            return ()
        which = _number(headers[0], "split.no")
        number = "?" if which is None else which + 1
        return (
            f"split {number} of {total} of a GGUF model: name the first one, ...-00001-of-{total:05d}.gguf, "
            "to load all",
        )
    numbers = {_number(h, "split.no"): h for h in headers}
    for header in headers:
        count = _number(header, "split.count")
        if count != len(headers):
            raise FormatError(
                f"split.count is {count}, but {counted(len(headers), 'file')} were given",
                filename=header.path,
            )
    for number in range(len(headers)):
        if number not in numbers:
            raise FormatError(
                f"no file of the split has split.no {number}: the files of two models, or one of them twice",
                filename=headers[number].path,
            )
    promised, held = _number(headers[0], "split.tensors.count"), sum(len(h.tensors) for h in headers)
    if promised is not None and promised != held:
        raise FormatError(
            f"split.tensors.count is {promised}, its files hold {held}", filename=headers[0].path
        )
    return ()


def _number(header: Header, key: str) -> int | None:
    text = header.metadata.get(key, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None
