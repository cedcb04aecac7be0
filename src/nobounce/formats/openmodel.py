"""An open model: its headers are read once, and as much of it as is wanted is loaded,
as often as it is wanted."""

from __future__ import annotations

from collections.abc import Iterator, KeysView
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, overload

from nobounce.device import DeviceLike, as_device
from nobounce.dtypes import DType
from nobounce.errors import ArgumentError, ClosedError, clip, printable
from nobounce.formats.loading import Framework, Progress
from nobounce.formats.model import Model, asked, bring
from nobounce.formats.opened import Opened, Paths, close_files, open_files
from nobounce.formats.tensorinfo import Encoding
from nobounce.records import record
from nobounce.route.types import Cache, Require

if TYPE_CHECKING:
    import numpy as np
    import torch

    from nobounce.formats.into import Into
    from nobounce.formats.selection import Names, Slices
    from nobounce.tensor import Tensor


@record
class StoredTensor:
    """A tensor of an open model: `nbytes` bytes of the file at `path`, from `file_offset` on. `encoding` says
    what quantised bytes are."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    nbytes: int
    path: str
    file_offset: int
    encoding: Encoding | None = None


def open_model(paths: Paths) -> OpenModel:
    """Open model files, as `load` takes them, and check every header. A context manager.

        with nobounce.open_model("model/") as m:
            layer = m.load(names="model.layers.0.*", device="cuda:0", framework="torch")

    Raises as `load` does before anything moves.
    """
    files, opened = open_files(paths)
    return OpenModel._of(opened, files.warnings)


class OpenModel:
    """Files of a model whose headers have been read and checked. Made by `open_model`.

    Attributes: `metadata` (of the headers, first file wins), `warnings`.
    """

    metadata: dict[str, str]
    warnings: tuple[str, ...]
    _opened: list[Opened]
    _files: dict[str, Opened]
    _own_warnings: tuple[str, ...]
    _closed: bool

    def __init__(self) -> None:
        raise TypeError("an OpenModel is made by nobounce.open_model()")

    @classmethod
    def _of(cls, opened: list[Opened], warnings: tuple[str, ...]) -> OpenModel:
        self = cls.__new__(cls)
        self._opened, self._closed, self._own_warnings = opened, False, warnings
        self._files = {name: one for one in opened for name in one.header.tensors}
        self.warnings = (*warnings, *(w for one in opened for w in one.header.warnings))
        self.metadata = {}
        for one in opened:
            self.metadata = {**one.header.metadata, **self.metadata}
        return self

    def keys(self) -> KeysView[str]:
        """The names of the tensors, in the order of the files."""
        return self._files.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def info(self, name: str) -> StoredTensor:
        """What the file says of a tensor. ArgumentError for a name that the model does not have."""
        one = self._files.get(name)
        if one is None:
            raise ArgumentError(f"the model has no tensor {printable(clip(name))!r}")
        info, detail = one.header.tensors[name], one.header.details.get(name)
        encoding = None if detail is None else detail.encoding
        place = one.header.data_offset + info.start
        return StoredTensor(
            name, info.dtype, info.shape, one.header.nbytes_of(info), one.path, place, encoding
        )

    @overload
    def load(
        self,
        *,
        device: DeviceLike = None,
        framework: None = None,
        require: Require = "auto",
        cache: Cache = "auto",
        align: int | None = None,
        progress: Progress | None = None,
        names: Names = None,
        slices: Slices | None = None,
        pinned: bool = False,
    ) -> Model[Tensor]: ...

    @overload
    def load(
        self,
        *,
        device: DeviceLike = None,
        framework: Literal["numpy"],
        require: Require = "auto",
        cache: Cache = "auto",
        align: int | None = None,
        progress: Progress | None = None,
        names: Names = None,
        slices: Slices | None = None,
        pinned: bool = False,
    ) -> Model[np.ndarray[Any, Any]]: ...

    @overload
    def load(
        self,
        *,
        device: DeviceLike = None,
        framework: Literal["torch"],
        require: Require = "auto",
        cache: Cache = "auto",
        align: int | None = None,
        progress: Progress | None = None,
        names: Names = None,
        slices: Slices | None = None,
        pinned: bool = False,
        shared_storage: bool = False,
    ) -> Model[torch.Tensor]: ...

    @overload
    def load(
        self,
        *,
        device: DeviceLike = None,
        require: Require = "auto",
        cache: Cache = "auto",
        progress: Progress | None = None,
        names: Names = None,
        slices: Slices | None = None,
        into: Into,
        strict: bool = False,
    ) -> Model[Any]: ...

    def load(
        self,
        *,
        device: DeviceLike = None,
        framework: Framework | None = None,
        require: Require = "auto",
        cache: Cache = "auto",
        align: int | None = None,
        progress: Progress | None = None,
        names: Names = None,
        slices: Slices | None = None,
        shared_storage: bool = False,
        into: Any = None,
        strict: bool = False,
        pinned: bool = False,
    ) -> Model[Any]:
        """What `nobounce.load` does, without reading the headers again. Raises as it does; ClosedError;
        FileChangedError where a file is not the one that was opened."""
        if self._closed:
            raise ClosedError("the model is closed")
        how, wish = asked(
            framework, shared_storage, require, cache, align, progress, names, slices, into, strict, pinned
        )
        target = None if device is None and into is not None else as_device(device)
        return bring(self._opened, self._own_warnings, target, how, wish)

    def close(self) -> None:
        """Close the files. What was loaded stays."""
        self._closed = True
        close_files(self._opened)

    def __enter__(self) -> OpenModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<nobounce.OpenModel of {len(self._files)} tensors{', closed' if self._closed else ''}>"
