"""Many blocks of one file in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nobounce.io.batch.batch import Batch
from nobounce.io.batch.columns import largest
from nobounce.io.receipt import Receipt
from nobounce.protocols import BufferLike, StreamLike
from nobounce.route.types import Cache, Require

if TYPE_CHECKING:
    from nobounce.io.file import File
    from nobounce.io.transfer import Transfer


def read_many(
    file: File,
    buffer: BufferLike,
    where: tuple[Any, Any, Any],
    require: Require,
    cache: Cache,
    stream: StreamLike | None,
) -> Receipt | Transfer:
    """As `File.read_many`; `where` is (file offsets, sizes, buffer offsets)."""
    file_offsets, nbytes, buffer_offsets = where
    with Batch(capacity=max(1, largest(where))) as batch:
        batch.read(
            file,
            buffer,
            file_offsets=file_offsets,
            nbytes=nbytes,
            buffer_offsets=buffer_offsets,
            require=require,
            cache=cache,
        )
        if stream is not None:
            return batch.submit(stream=stream)._transfer
        result = batch.wait()
        if result.errors:
            first, *others = result.errors.values()
            if others:
                first.add_note(f"{len(others)} more of the {len(result)} blocks failed")
            raise first
        return batch.receipt
