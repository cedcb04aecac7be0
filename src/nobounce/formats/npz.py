"""Arrays in a zip archive, as numpy.savez writes them: stored members, each a .npy file. An array's name is
its member's, without the ending."""

from __future__ import annotations

from nobounce.errors import clip, printable
from nobounce.formats.assemble import MOST_TENSORS, assemble
from nobounce.formats.npy import MOST_HEADER, read_array
from nobounce.formats.reader import Cursor, Source
from nobounce.formats.tensorinfo import Block, Detail, Header, TensorInfo
from nobounce.formats.zipdir import Archive, Member

_SUFFIX = ".npy"
_CURE = "pack it anew: numpy.savez(NEW, **numpy.load(OLD))"
_SHOWN = 5


def read(source: Source, path: str, file_nbytes: int) -> Header:
    """Read and check the directory and every array's header. Raises FormatError, and
    FileError where reading fails."""
    archive = Archive(source, path, file_nbytes)
    arrays = {m.name.removesuffix(_SUFFIX): m for m in archive.members.values() if m.name.endswith(_SUFFIX)}
    others = [m for m in archive.members.values() if not m.name.endswith(_SUFFIX)]
    if len(arrays) > MOST_TENSORS:
        raise archive.bad(f"{len(arrays)} arrays are more than {MOST_TENSORS}")
    packed = next((m for m in arrays.values() if m.method != 0), None)
    if packed is not None:
        raise archive.bad(
            f"is compressed ({packed.how}), and its bytes can only go where they belong as they are: {_CURE}",
            packed.name,
        )
    infos: list[TensorInfo] = []
    blocks: list[tuple[str, Block]] = []
    details: dict[str, Detail] = {}
    begins = archive.begins(arrays.values())
    for name, member in arrays.items():
        begin = begins[member.name]
        cursor = Cursor(
            source, path, min(file_nbytes, begin + member.nbytes), begin, MOST_HEADER + 12, first=256
        )
        array = read_array(cursor, name)
        if array.begin + array.nbytes != begin + member.nbytes:
            raise cursor.bad(
                f"its array of {array.nbytes} bytes does not fill its member, which holds "
                f"{begin + member.nbytes - array.begin}",
                tensor=name,
            )
        info, block, detail = array.placed(name)
        infos.append(info)
        blocks.append(block)
        if detail is not None:
            details[name] = detail
    return assemble(
        infos,
        format="npz",
        path=path,
        file_nbytes=file_nbytes,
        header_nbytes=archive.directory_nbytes,
        metadata={},
        blocks=blocks,
        details=details,
        warnings=_warnings(others),
    )


def _warnings(others: list[Member]) -> tuple[str, ...]:
    if not others:
        return ()
    shown = ", ".join(printable(clip(m.name, 60)) for m in others[:_SHOWN])
    more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
    return (f"members that are no arrays are ignored: {shown}{more}",)
