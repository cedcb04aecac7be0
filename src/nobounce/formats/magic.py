"""What a file really is, told by its first bytes, where it is not the model file that it was taken for.

Downloads bring error pages and pointers under the name that was asked for, and checkpoints of other kinds are
renamed. The signatures are those of file(1); Git LFS: github.com/git-lfs/git-lfs/blob/main/docs/spec.md.
"""

from __future__ import annotations

import re

from nobounce.errors import printable

HEAD = 512
"""Bytes from the beginning of a file that tell what it is."""

AGAIN = "download the file again"
_OTHER = "nobounce reads safetensors: fetch the model in that format"
_UNPACK = "unpack it and name the file inside"
_CONVERT = (
    "nobounce reads the zip archives that torch.save writes since 1.6: "
    "torch.save(torch.load(OLD, weights_only=True, map_location='cpu'), NEW)"
)
# Compiled when they are asked, which few loads do: at import they cost more than the rest of this module.
_LFS = rb"version https://(?:git-lfs\.github\.com|hawser\.github\.com)/"
_LFS_SIZE = rb"\nsize ([0-9]{1,19})\n"
_PAGE = rb"(?i)\s*<(?:!doctype|html|head|body|\?xml|!--|error)"
_TORCH = rb"[^/]*/(data\.pkl|constants\.pkl|version|byteorder|archive_format|\.\w+|(data|code|extra)/.*)"
_PICKLE = rb"\x80[\x02-\x05]"
_JSON = rb"\s*[{\[]\s*[\"{\[}\]]"
_STARTS = (
    (b"GGUF", "a GGUF file", "name it by itself"),
    (b"\x93NUMPY", "an array of NumPy", "name it by itself"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", _OTHER),
    (b"ARROW1\0\0", "an Arrow file", _OTHER),
    (b"PAR1", "a Parquet file", _OTHER),
    (b"\x1f\x8b", "compressed by gzip", _UNPACK),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd", _UNPACK),
    (b"\xfd7zXZ\0", "compressed by xz", _UNPACK),
    (b"BZh", "compressed by bzip2", _UNPACK),
    (b"\x04\x22\x4d\x18", "compressed by lz4", _UNPACK),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
    (b"Rar!\x1a\x07", "a RAR archive", _UNPACK),
    (b"\x7fELF", "a program or a library", AGAIN),
    (b"%PDF-", "a PDF document", AGAIN),
    (b"\x89PNG\r\n\x1a\n", "a picture", AGAIN),
    (b"\xff\xd8\xff", "a picture", AGAIN),
    (b"\xff\xfe", "text as UTF-16", f"if it is a server's answer, {AGAIN}"),
    (b"\xfe\xff", "text as UTF-16", f"if it is a server's answer, {AGAIN}"),
)


def is_gguf(head: bytes) -> bool:
    """Whether a file that begins with `head` is a GGUF model."""
    return head.startswith(b"GGUF")


def is_npy(head: bytes) -> bool:
    """Whether it is an array of NumPy."""
    return head.startswith(b"\x93NUMPY")


def is_npz(head: bytes) -> bool:
    """Whether it is an archive of NumPy arrays: its first member is one. An archive of nothing counts too."""
    return first_member(head).endswith(b".npy") or head.startswith(b"PK\5\6")


def is_checkpoint(head: bytes) -> bool:
    """Whether it is a zip archive by PyTorch."""
    member = first_member(head)
    return bool(member) and re.match(_TORCH, member) is not None


def first_member(head: bytes) -> bytes:
    """The name of the first file of a zip archive; b"" where it is none, or the name
    is longer than `head`."""
    if not head.startswith(b"PK\3\4"):
        return b""
    end = 30 + int.from_bytes(head[26:28], "little")
    return head[30:end] if end <= len(head) else b""


def what_it_is(head: bytes) -> str | None:
    """A sentence that names the kind of file that begins with `head` (up to `HEAD` bytes) and says what to
    do; None where the bytes do not tell, or are those of a safetensors file.
    """
    if re.match(_LFS, head):
        size = re.search(_LFS_SIZE, head)
        held = f" of {int(size[1]):,} bytes" if size else ""
        return (
            f"this is a Git LFS pointer, which stands for the file{held}: `git lfs pull` in its repository "
            "fetches it"
        )
    if re.match(_PAGE, head):
        return f"this is a web page or a server's error, not the file: {AGAIN}, logged in where it needs that"
    if head.startswith((b"PK\3\4", b"PK\5\6")):
        return f"this is a zip archive: {_UNPACK}"
    if re.match(_PICKLE, head):
        return f"this is a pickle, as older PyTorch checkpoints are: {_CONVERT}"
    for start, kind, cure in _STARTS:
        if head.startswith(start):
            return f"this is {kind}: {cure}"
    if head[4:8] == b"TFL3":
        return f"this is a TensorFlow Lite model: {_OTHER}"
    if head[257:262] == b"ustar":
        return f"this is a tar archive: {_UNPACK}"
    if not head.strip(b"\0"):
        return f"the file begins with zeros, as an unfinished download does: {AGAIN}"
    if re.match(_JSON, head):
        return (
            "this is JSON text: an index is named *.safetensors.index.json; if it is a server's answer, "
            f"{AGAIN}"
        )
    return _text(head)


def _text(head: bytes) -> str | None:
    try:
        shown = head[:60].decode("ascii")
    except UnicodeDecodeError:
        return None
    if not all(c.isprintable() or c in "\t\r\n" for c in shown):
        return None
    return f"this is text ({printable(shown[:40])!r}): if it is a server's answer, {AGAIN}"
