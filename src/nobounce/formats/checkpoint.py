"""Checkpoints of PyTorch: what torch.save writes since torch 1.6, a zip archive of a pickle and one stored
member for each storage.

The pickle says how tensors look at storages: offset, sizes and strides in elements. It is read by `unpickle`,
which executes nothing. A tensor's name is the way to it through dictionaries and lists, with dots between:
{"state_dict": {"w": t}} holds "state_dict.w", and [t] holds "0". Where two tensors would have one name the
file is refused. Plain values found on the way become metadata. Tensors that share a storage share its memory
here too, and tags such as cuda:0 mean nothing: a tensor goes where it is asked for (case C120).

Torch's side: torch/serialization.py (_save, _load), torch/_utils.py (_rebuild_tensor_v2,
_rebuild_tensor_v3), torch/storage.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

from nobounce.dtypes import C32, C128, DTYPES, DType, contiguous_strides
from nobounce.errors import FormatError, clip
from nobounce.formats import magic
from nobounce.formats.assemble import MOST_DIMS, assemble
from nobounce.formats.flatten import Storage, Tensor, flatten
from nobounce.formats.header import HEADER_LIMIT
from nobounce.formats.reader import Source
from nobounce.formats.tensorinfo import Block, Detail, Header, TensorInfo
from nobounce.formats.unpickle import BadPickleError, Name, Pairs, unpickle
from nobounce.formats.zipdir import Archive, Member

_ROOM_A_BYTE = 64
"""Bytes of memory that the values of a pickle may take for each of its bytes: torch's own come to some 8, and
are charged for 26 to 54."""
_MOST_ROOM = 512 << 20
"""And altogether; those of a larger file may take its size."""
_CURE = "save tensors alone: torch.save(model.state_dict(), NEW)"

_STORAGES = {
    "Double": "F64", "Float": "F32", "Half": "F16", "Long": "I64", "Int": "I32", "Short": "I16", "Char": "I8",
    "Byte": "U8", "Bool": "BOOL", "BFloat16": "BF16", "ComplexFloat": "C64",
}  # fmt: skip
_DTYPES: dict[str, DType] = {
    f"torch.{d.torch}": d for d in (*DTYPES.values(), C128, C32) if d.torch is not None
}
_FOUR_BITS = "F4"


def read(source: Source, path: str, file_nbytes: int) -> Header:
    """Read and check the directory, the pickle and every storage's place. Raises FormatError, and
    FileError where reading fails."""
    archive = Archive(source, path, file_nbytes)
    root = next(iter(archive.members), "").partition("/")[0]
    pickled = archive.members.get(f"{root}/data.pkl")
    if f"{root}/constants.pkl" in archive.members:
        raise archive.bad(
            "this is TorchScript, which holds code: torch.save(torch.jit.load(OLD).state_dict(), NEW)"
        )
    if pickled is None:
        raise archive.bad(
            "a zip archive of PyTorch without data.pkl, so not by torch.save: load it with what wrote it, "
            "and " + _CURE
        )
    byteorder = archive.members.get(f"{root}/byteorder")
    big = byteorder is not None and archive.read(byteorder, 16) == b"big"
    raw = archive.read(pickled, HEADER_LIMIT)
    room = min(_ROOM_A_BYTE * len(raw) + (1 << 20), max(_MOST_ROOM, file_nbytes))
    try:
        found = flatten(unpickle(raw, _NAMES, _storage, room), path, len(raw))
    except BadPickleError as error:
        cure = f"; {_CURE}" if "holds" in error.reason or "calls" in error.reason else ""
        raise archive.bad(
            f"the pickle {error.reason}{cure}", offset=min(pickled.local + error.offset, file_nbytes)
        ) from None
    storages = _Storages(archive, root, big, (t.storage for t in found.tensors.values()))
    infos: list[TensorInfo] = []
    details: dict[str, Detail] = {}
    for name, tensor in found.tensors.items():
        info, strides = storages.place(name, tensor)
        infos.append(info)
        if strides is not None:
            details[name] = Detail(strides=strides)
    return assemble(
        infos,
        format="PyTorch checkpoint",
        path=path,
        file_nbytes=file_nbytes,
        header_nbytes=pickled.nbytes,
        metadata=found.metadata,
        blocks=storages.blocks(),
        details=details,
        warnings=found.warnings,
    )


class _Held:
    """A storage in the file: its member, where that begins, and what its tensors want."""

    def __init__(self, member: Member, begin: int) -> None:
        self.member, self.begin = member, begin
        self.first = ""
        self.align = self.swap = 1


class _Storages:
    """The storages that tensors look at."""

    def __init__(self, archive: Archive, root: str, big: bool, storages: Iterable[Storage]) -> None:
        self._archive, self._big = archive, big
        self._sizes: dict[str, int] = {}
        members: dict[str, Member] = {}
        for storage in storages:
            known = self._sizes.setdefault(storage.key, storage.nbytes)
            if known != storage.nbytes:
                raise archive.bad(f"storage {clip(storage.key)!r} has {known} bytes and {storage.nbytes}")
            if storage.key in members:
                continue
            member = archive.members.get(f"{root}/data/{storage.key}")
            if member is None:
                raise archive.bad(f"storage {clip(storage.key)!r} is missing; {magic.AGAIN}")
            if member.nbytes != storage.nbytes:
                raise archive.bad(
                    f"holds {member.nbytes} bytes, its storage needs {storage.nbytes}",
                    member.name,
                    member.local,
                )
            members[storage.key] = member
        begins = archive.begins(members.values())
        self._held = {key: _Held(member, begins[member.name]) for key, member in members.items()}

    def place(self, name: str, tensor: Tensor) -> tuple[TensorInfo, tuple[int, ...] | None]:
        """The tensor, its range counted from the start of the file, and its strides
        unless it is C-contiguous."""
        held, dtype, shape = self._held[tensor.storage.key], tensor.dtype, tensor.shape
        size = max(1, dtype.bits // 8)
        count = prod(shape)
        last = (
            tensor.offset + sum((n - 1) * s for n, s in zip(shape, tensor.strides, strict=True))
            if count
            else 0
        )
        if count and (last + 1) * size > held.member.nbytes:
            raise self._bad(f"reaches behind its storage of {held.member.nbytes} bytes", name, held)
        swap = dtype.alignment if self._big else 1
        if count:
            if held.swap not in (1, swap) and swap != 1:
                raise self._bad(
                    "looks at a big-endian storage with another type than a tensor before it", name, held
                )
            held.first, held.align, held.swap = (
                held.first or name,
                max(held.align, dtype.alignment),
                max(held.swap, swap),
            )
        strides = _strides(shape, tensor.strides) if count else None
        if dtype.name == _FOUR_BITS:
            # torch counts bytes of two elements each; here elements are counted.
            if strides is not None or not shape:
                raise self._bad(
                    "float4_e2m1fn_x2 that is not contiguous: save it with .contiguous()", name, held
                )
            shape = *shape[:-1], 2 * shape[-1]
        start = held.begin + tensor.offset * size if count else 0
        return TensorInfo(name, dtype, shape, start, held.begin + (last + 1) * size if count else 0), strides

    def _bad(self, reason: str, name: str, held: _Held) -> FormatError:
        return FormatError(reason, filename=self._archive.path, tensor=name, offset=held.begin)

    def blocks(self) -> list[tuple[str, Block]]:
        """Each storage, under the name of its first tensor."""
        return [
            (h.first, Block(h.begin, h.begin + h.member.nbytes, h.align, h.swap))
            for h in self._held.values()
            if h.first
        ]


def _strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """`strides`, or None where they are those of a C-contiguous tensor. Those of
    dimensions of 1 mean nothing."""
    same = all(n == 1 or a == b for n, a, b in zip(shape, strides, contiguous_strides(shape), strict=True))
    return None if same else strides


def _storage(pid: Any) -> Storage:
    """The storage of a persistent id: ("storage", class, key, location, number of elements)."""
    if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage":
        raise BadPickleError("has a persistent id that is no storage")
    _, kind, key, _, count = pid
    if (
        type(kind) is not Name
        or kind.text not in _CLASSES
        or type(key) is not str
        or type(count) is not int
        or count < 0
    ):
        raise BadPickleError("has a storage that torch does not write")
    dtype = _CLASSES[kind.text]
    return Storage(key, dtype, count * (1 if dtype is None else dtype.bits // 8))


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, dtype: DType | None) -> Tensor:
    """A tensor, its fields checked; that it stays in its storage is checked against the file."""
    sizes = [shape, strides]
    if type(storage) is not Storage or type(offset) is not int or any(type(s) is not tuple for s in sizes):
        raise BadPickleError("has a tensor that torch does not write")
    for size in sizes:
        if len(size) > MOST_DIMS or len(size) != len(shape) or any(type(n) is not int for n in size):
            raise BadPickleError("has a tensor whose sizes and strides torch does not write")
    if min(offset, *shape, *strides, 0) < 0 or max(offset, *shape, *strides, 0) >> 63:
        raise BadPickleError("has a tensor with a negative size, or one of more than 63 bits")
    whole = 1
    for n in shape:
        whole *= n or 1
        if whole >> 63:
            raise BadPickleError("has a tensor whose size overflows 64 bits")
    dtype = dtype or storage.dtype
    if dtype is None:
        raise BadPickleError("has a tensor without a type")
    return Tensor(storage, dtype, offset, shape, strides)


def _v2(arguments: tuple[Any, ...]) -> Tensor:
    """(storage, offset, size, stride[, requires_grad, hooks[, metadata]])"""
    if not 4 <= len(arguments) <= 7:
        raise BadPickleError("has a tensor that torch does not write")
    if len(arguments) == 7:
        _no_metadata(arguments[6])
    storage, offset, shape, strides = arguments[:4]
    return _tensor(storage, offset, shape, strides, None)


def _v3(arguments: tuple[Any, ...]) -> Tensor:
    """(storage, offset, size, stride, requires_grad, hooks, dtype[, metadata])"""
    if not 7 <= len(arguments) <= 8 or type(arguments[6]) is not Name:
        raise BadPickleError("has a tensor that torch does not write")
    if len(arguments) == 8:
        _no_metadata(arguments[7])
    dtype = _DTYPES.get(arguments[6].text)
    if dtype is None:
        raise BadPickleError(f"holds a tensor of {arguments[6].text}, which is not read")
    storage, offset, shape, strides = arguments[:4]
    return _tensor(storage, offset, shape, strides, dtype)


def _no_metadata(value: Any) -> None:
    """A tensor that is to be conjugated or negated when it is used is not what its bytes say."""
    if isinstance(value, Pairs) and any(flag is not False for _, flag in value.pairs):
        raise BadPickleError(
            "holds a tensor that is conjugated or negated lazily: save t.resolve_conj().resolve_neg()"
        )


def _parameter(arguments: tuple[Any, ...]) -> Tensor:
    """(tensor, requires_grad, hooks[, state])"""
    if not 3 <= len(arguments) <= 4 or type(arguments[0]) is not Tensor:
        raise BadPickleError("has a parameter that torch does not write")
    return arguments[0]


def _from_type(arguments: tuple[Any, ...]) -> Any:
    """(function, class, arguments, attributes): a tensor with attributes, which are
    nothing that is loaded."""
    if (
        len(arguments) != 4
        or type(arguments[0]) is not Name
        or arguments[0].call is None
        or type(arguments[2]) is not tuple
    ):
        raise BadPickleError("has a tensor that torch does not write")
    made = arguments[0].call(arguments[2]) if arguments[0].call is not _from_type else None
    if type(made) is not Tensor:
        raise BadPickleError("has a tensor that torch does not write")
    return made


def _dictionary(arguments: tuple[Any, ...]) -> Pairs:
    """OrderedDict(), or OrderedDict of a list of pairs or of a dictionary."""
    made = Pairs()
    if not arguments:
        return made
    (items,) = arguments if len(arguments) == 1 else (None,)
    if isinstance(items, Pairs):
        return items
    if type(items) is not list or any(type(i) not in (tuple, list) or len(i) != 2 for i in items):
        raise BadPickleError("has a dictionary that torch does not write")
    made.pairs.extend((key, value) for key, value in items)
    return made


def _list(arguments: tuple[Any, ...]) -> Any:
    """set([...]), torch.Size((...)), bytearray(b"...") and their like: their one argument."""
    return arguments[0] if len(arguments) == 1 else list(arguments)


def _device(arguments: tuple[Any, ...]) -> str:
    """torch.device("cuda", 1): text."""
    return ":".join(str(a) for a in arguments if type(a) in (str, int))


def _encoded(arguments: tuple[Any, ...]) -> bytes:
    """bytes, as protocol 2 has them: _codecs.encode(text, "latin1")."""
    if len(arguments) != 2 or type(arguments[0]) is not str or arguments[1] != "latin1":
        raise BadPickleError("calls '_codecs.encode' for something else than bytes")
    return arguments[0].encode("latin-1", "replace")


_CLASSES: dict[str, DType | None] = {
    **{f"torch.{name}Storage": DTYPES[dtype] for name, dtype in _STORAGES.items()},
    "torch.ComplexDoubleStorage": C128,
    "torch.storage.UntypedStorage": None,
    "torch.UntypedStorage": None,
}
_CALLS: dict[str, Any] = {
    "torch._utils._rebuild_tensor": _v2,
    "torch._utils._rebuild_tensor_v2": _v2,
    "torch._utils._rebuild_tensor_v3": _v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "collections.OrderedDict": _dictionary,
    "collections.Counter": _dictionary,
    "_codecs.encode": _encoded,
    "builtins.set": _list,
    "builtins.frozenset": _list,
    "builtins.bytearray": _list,
    "builtins.complex": _list,
    "torch.Size": _list,
    "torch.device": _device,
}
_VALUES = ("torch.Tensor", "torch.nn.parameter.Parameter", *_CLASSES, *_DTYPES)
_NAMES: dict[str, Name] = {
    **{text: Name(text) for text in _VALUES},
    **{text: Name(text, call) for text, call in _CALLS.items()},
}
