"""Which files make up a model: one file, several, a folder, or a folder with an index that says what is
where.

An index is a file from a stranger like any other. A shard name in it must stay in the index's folder: no
absolute path, no "..", no NUL. Symbolic links are followed, since download caches keep their files elsewhere
and link to them (snapshots/ to blobs/): the links were made by whoever owns the folder, the names come with
the model.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from nobounce import errors, misnamed
from nobounce.errors import FormatError, clip, printable
from nobounce.formats import magic, sets
from nobounce.formats.header import HEADER_LIMIT, open_regular
from nobounce.formats.strictjson import Repeated, loads
from nobounce.records import field, record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nobounce.formats.header import Header

INDEX_NAME = "model.safetensors.index.json"
_SUFFIX = ".safetensors"
_INDEX_SUFFIX = ".safetensors.index.json"
PIPELINE_NAME = "model_index.json"
"""What the root of a pipeline holds: its models are in folders of their own
(huggingface.co/docs/diffusers)."""
_OTHERS = (".pkl", ".h5", ".onnx", ".msgpack")
_NUMBERED = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.safetensors")
_PIECE = 16 << 20


@record
class Shard:
    """One file of a model: `name` (as its index spells it, else the path) and `path`."""

    name: str
    path: str


@record
class Index:
    """A checked index: `path`, `weight_map` (tensor name to shard name), its `metadata` as JSON gave it."""

    path: str
    weight_map: dict[str, str]
    metadata: dict[str, Any] = field(default_factory=dict)


@record
class ModelFiles:
    """The shards of a model in the order of their names, its index if it has one, what is odd about the
    folder, and which of the shards are not there.
    """

    shards: tuple[Shard, ...]
    index: Index | None = None
    warnings: tuple[str, ...] = ()
    missing: tuple[Shard, ...] = ()


@record
class IndexReport:
    """Where index and shards disagree.

    Attributes: `absent` (tensor, shard) pairs that the index promises and the shard lacks; `unlisted` pairs
    that the shard has and the index does not give to it; `warnings`.
    """

    absent: tuple[tuple[str, str], ...] = ()
    unlisted: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = ()


def resolve(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> ModelFiles:
    """The files behind `paths`: a file, a folder, an index file, or several files.

    In a folder an index wins over every other file (case C92). FormatError for a bad index and for missing
    shards, all of them named (case C89); FileError for paths that do not exist or hold no model. Shards are
    not opened.
    """
    if isinstance(paths, str | os.PathLike):
        files = find(paths)
        if files.missing:
            named = files.index.path if files.index is not None else os.fsdecode(paths)
            count = f"{len(files.missing)} of {len(files.shards)} shards missing"
            reason = f"{count}: {_gone(files.missing)}; {magic.AGAIN}"
            raise FormatError(reason, filename=named, tensor=_first_tensor(files))
        return files
    several = [_text(path) for path in paths]
    if not several:
        raise errors.ArgumentError("no path given")
    seen: dict[tuple[int, int], str] = {}
    for path in several:
        status = _stat(path)
        if stat.S_ISDIR(status.st_mode):
            raise errors.FileError.from_oserror(
                OSError(errno.EISDIR, ""), path, "take a folder as one of several files"
            )
        other = seen.setdefault((status.st_dev, status.st_ino), path)
        if other is not path:
            raise errors.ArgumentError(f"{printable(path)} and {printable(other)} are the same file")
    return ModelFiles(tuple(Shard(path, path) for path in several))


def find(path: str | os.PathLike[str]) -> ModelFiles:
    """The files of the model at one path, those included that are not there (`missing`): what is
    loaded, and what is checked.

    Raises as `resolve` does, but for missing shards.
    """
    name = _text(path)
    if stat.S_ISDIR(_stat(name).st_mode):
        return _find_in_folder(name)
    if name.endswith((_INDEX_SUFFIX, sets.INDEX_SUFFIX)):
        return _find_by_index(name)
    return _several(sets.first_of_split(name) or [name])


def holds_model(folder: str) -> bool:
    """Whether a folder has something that `find` takes for a model, or is a pipeline's root. False
    where it cannot be listed."""
    names = _entries(folder)
    return any(_is_model(n, folder) or n == PIPELINE_NAME for n in names) or bool(
        sets.models_among(names, folder)
    )


def holds_choice(folder: str) -> bool:
    """Whether a folder has several models of other formats, of which `find` takes none."""
    names = _entries(folder)
    return not any(_is_model(n, folder) for n in names) and len(sets.models_among(names, folder)) > 1


def _several(paths: Sequence[str]) -> ModelFiles:
    shards = tuple(Shard(path, path) for path in paths)
    return ModelFiles(shards, missing=_missing(shards) if len(shards) > 1 else ())


def _is_model(name: str, folder: str) -> bool:
    if name.startswith("."):
        return False
    return name.endswith(_INDEX_SUFFIX) or (name.endswith(_SUFFIX) and not os.path.isdir(f"{folder}/{name}"))


def _find_in_folder(folder: str) -> ModelFiles:
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise errors.FileError.from_oserror(error, folder, "list the folder") from error
    there = [name for name in names if _is_model(name, folder)]
    indexes = [name for name in there if name.endswith(_INDEX_SUFFIX)]
    if INDEX_NAME in indexes:
        indexes = [INDEX_NAME]
    if len(indexes) > 1:
        raise errors.ArgumentError(
            f"{printable(folder)}: several indexes ({_listed(indexes)}); give the path of one"
        )
    models = [name for name in there if name.endswith(_SUFFIX)]
    if indexes:
        return _find_by_index(os.path.join(folder, indexes[0]), models)
    if not models and (others := sets.models_among(names, folder)):
        return _find_other(folder, others)
    if not models:
        message = (
            f"{printable(folder)}: the folder holds no {_SUFFIX} file, no {INDEX_NAME} and no model of "
            f"another format: {_elsewhere(folder, names)}"
        )
        raise errors.FileMissingError(message, errno.ENOENT, folder)
    paths = [os.path.join(folder, name) for name in sorted({*models, *_numbered_gaps(models)})]
    shards = tuple(Shard(path, path) for path in paths)
    return ModelFiles(shards, missing=_missing(shards))


def _find_other(folder: str, models: dict[str, list[str]]) -> ModelFiles:
    """The model of another format in a folder without safetensors."""
    if len(models) > 1:
        shown = _listed([os.path.join(folder, n) for n in models], 20)
        raise errors.ArgumentError(f"{printable(folder)}: {len(models)} models; name one of {shown}")
    (files,) = models.values()
    if files[0].endswith(sets.INDEX_SUFFIX):
        return _find_by_index(os.path.join(folder, files[0]))
    return _several([os.path.join(folder, name) for name in files])


def _elsewhere(folder: str, names: Sequence[str]) -> str:
    """Where the models of a folder that holds none itself are, or what else to do."""
    # The root of a model in the Hugging Face cache has one folder for each revision.
    revisions = [f"snapshots/{name}" for name in _entries(f"{folder}/snapshots")]
    below = [name for name in (*names, *revisions) if holds_model(f"{folder}/{name}")]
    others = [name for name in names if name.endswith(_OTHERS)]
    if below:
        what = "it is a pipeline of several models" if PIPELINE_NAME in names else "there are models below it"
        return f"{what}; name one of {_listed([os.path.join(folder, n) for n in below], 20)}"
    if others:
        return (
            f"it has {_listed(others, 5)}, which nobounce does not read: fetch the model as safetensors, or "
            "convert it"
        )
    return "name a folder that does, or a file"


def _entries(folder: str) -> list[str]:
    """The names in a folder, sorted; none where it cannot be listed."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _numbered_gaps(models: Sequence[str]) -> Iterable[str]:
    """Every name that the numbers in "model-00001-of-00003.safetensors" promise."""
    for prefix, total in sorted({(m[1], m[3]) for m in map(_NUMBERED.fullmatch, models) if m}):
        yield from (f"{prefix}-{number:05d}-of-{total}{_SUFFIX}" for number in range(1, int(total) + 1))


def _find_by_index(path: str, models: Sequence[str] = ()) -> ModelFiles:
    index = read_index(path)
    folder = os.path.dirname(path)
    names = sorted(set(index.weight_map.values()))
    shards = tuple(Shard(name, os.path.join(folder, name)) for name in names)
    ignored = [name for name in models if name not in set(names)]
    warnings = (f"not in the index, ignored: {_listed(ignored)}",) if ignored else ()
    return ModelFiles(shards, index, warnings, _missing(shards))


def _missing(shards: Sequence[Shard]) -> tuple[Shard, ...]:
    missing = []
    for shard in shards:
        try:
            os.stat(shard.path)
        except (FileNotFoundError, NotADirectoryError):
            missing.append(shard)
        except OSError as error:
            raise errors.FileError.from_oserror(error, shard.path, "examine a shard") from error
    return tuple(missing)


def _gone(missing: Sequence[Shard]) -> str:
    """The missing shards by name; a link with what it names, as download caches have them."""
    shown = []
    for shard in missing[:20]:
        name = os.path.basename(shard.path) if shard.name == shard.path else shard.name
        target = misnamed.link_target(shard.path)
        link = "" if target is None else f" (a link to {printable(target)}, which is not there)"
        shown.append(f"{printable(name)}{link}")
    return ", ".join(shown) + (f" and {len(missing) - 20} more" if len(missing) > 20 else "")


def _first_tensor(files: ModelFiles) -> str | None:
    """A tensor that the first missing shard would hold."""
    tensors = files.index.weight_map.items() if files.index is not None else ()
    return next((tensor for tensor, name in tensors if name == files.missing[0].name), None)


def read_index(path: str | os.PathLike[str], *, limit: int = HEADER_LIMIT) -> Index:
    """Read and check an index of at most `limit` bytes. FileError where it cannot be read, FormatError where
    it is bad.
    """
    fd, nbytes, name = open_regular(path)
    try:
        if nbytes > limit:
            raise FormatError(f"an index of {nbytes} bytes is over the limit of {limit}", filename=name)
        pieces = []
        while piece := os.read(fd, min(_PIECE, limit)):
            pieces.append(piece)
            if sum(map(len, pieces)) > limit:
                raise FormatError(f"the index grew over the limit of {limit} bytes", filename=name)
    except OSError as error:
        raise errors.FileError.from_oserror(error, name, "read the index") from error
    finally:
        os.close(fd)
    return parse_index(b"".join(pieces), path=name)


def parse_index(raw: bytes, *, path: str) -> Index:
    """Check the JSON of an index. Pure. FormatError names the tensor whose entry is bad."""

    def bad(reason: str, tensor: str | None = None) -> NoReturn:
        raise FormatError(reason, filename=path, tensor=tensor)

    if raw.startswith(b"\xef\xbb\xbf"):
        bad("the index begins with a byte order mark")
    if not raw:
        bad(f"the index is empty; {magic.AGAIN}")
    if raw.lstrip()[:1] != b"{" and (real := magic.what_it_is(raw[: magic.HEAD])):
        bad(real)
    try:
        root = loads(raw.decode())
    except UnicodeDecodeError as error:
        raise FormatError("the index is not valid UTF-8", filename=path, offset=error.start) from None
    except ValueError as error:
        bad(f"the index is not valid JSON: {clip(str(error))}")
    if isinstance(root, Repeated):
        bad(f"{clip(root.key)!r} is given twice")
    if not isinstance(root, dict):
        bad("the index is not a JSON object")
    weight_map = root.get("weight_map")
    if isinstance(weight_map, Repeated):
        bad("given twice in weight_map", weight_map.key)
    if not isinstance(weight_map, dict):
        bad("weight_map, an object that maps tensor names to files, is missing")
    if not weight_map:
        bad("weight_map is empty: the index names no tensor")
    sound: dict[Any, str | None] = {}
    for tensor, shard in weight_map.items():
        if type(shard) is not str:
            bad("its file in weight_map is not a string", tensor)
        if shard not in sound:
            sound[shard] = _unsafe(shard)
        if sound[shard] is not None:
            bad(f"its file {clip(shard)!r} {sound[shard]}", tensor)
    metadata = root.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        bad("metadata is not an object")
    return Index(path, weight_map, metadata or {})


def _unsafe(shard: str) -> str | None:
    """Why a shard name from an index is not a file below the index's folder, or None."""
    if "\0" in shard:
        return "holds a NUL character"
    if shard.startswith("/"):
        return "is an absolute path; shards must lie in the folder of the index"
    parts = shard.split("/")
    if ".." in parts:
        return "leaves the folder of the index"
    if "" in parts or "." in parts:
        return "is no plain file name"
    return None


def verify_index(index: Index | None, headers: Mapping[str, Header], *, strict: bool = True) -> IndexReport:
    """Compare an index with the headers of its shards (by shard name; those not given are not judged).

    A tensor in two files is always refused, also without an index. Else, where index and shards disagree
    (case C91): FormatError if `strict`, else everything is listed in the report. Pure.
    """
    if index is None and len(headers) == 1:
        return IndexReport()
    owner: dict[str, str] = {}
    for shard, header in headers.items():
        for name in owner.keys() & header.tensors.keys():
            both = f"in two files: {printable(headers[owner[name]].path)} and {printable(header.path)}"
            raise FormatError(both, filename=header.path, tensor=name)
        owner.update(dict.fromkeys(header.tensors, shard))
    if index is None:
        return IndexReport()
    promised = {tensor: shard for tensor, shard in index.weight_map.items() if shard in headers}
    if promised == owner:
        return IndexReport(warnings=_size_warning(index, headers))
    absent = tuple((t, s) for t, s in promised.items() if owner.get(t) != s)
    unlisted = tuple((t, s) for t, s in owner.items() if promised.get(t) != s)
    if strict:
        parts = []
        if absent:
            parts.append(f"the index maps {len(absent)} tensors to files that lack them: {_pairs(absent)}")
        if unlisted:
            parts.append(f"{len(unlisted)} tensors are in files but not so in the index: {_pairs(unlisted)}")
        raise FormatError("; ".join(parts), filename=index.path, tensor=(absent or unlisted)[0][0])
    return IndexReport(absent, unlisted, _size_warning(index, headers))


def _size_warning(index: Index, headers: Mapping[str, Header]) -> tuple[str, ...]:
    total = index.metadata.get("total_size")
    if type(total) is not int or not headers.keys() >= set(index.weight_map.values()):
        return ()
    real = sum(header.data_nbytes for header in headers.values())
    return (
        () if real == total else (f"the index says {clip(str(total))} bytes in all, its shards hold {real}",)
    )


def _listed(names: Sequence[str], most: int | None = None) -> str:
    return ", ".join(printable(name) for name in names[:most])


def _pairs(pairs: Sequence[tuple[str, str]]) -> str:
    shown = ", ".join(f"{printable(t)} ({printable(s)})" for t, s in pairs[:20])
    return shown if len(pairs) <= 20 else f"{shown} and {len(pairs) - 20} more"


def _text(path: str | os.PathLike[str]) -> str:
    text = os.fsdecode(path)
    if "\0" in text:
        raise errors.ArgumentError(f"{printable(text)}: a path cannot hold a NUL character")
    return text


def _stat(path: str) -> os.stat_result:
    try:
        return os.stat(path)
    except OSError as error:
        raise errors.FileError.from_oserror(error, path, "open") from error
