"""Small files of /proc and /sys: what cannot be read, or is not what it should be, is
None rather than an error."""

from __future__ import annotations

import re

from nobounce.facts.source import Source

BDF = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def text(source: Source, path: str) -> str | None:
    """The stripped content of a file, or None."""
    try:
        return source.read_text(path).strip().strip("\0")
    except OSError:
        return None


def number(source: Source, path: str, base: int = 10) -> int | None:
    """The integer in a file, or None; `base` 0 takes a 0x prefix."""
    return integer(text(source, path) or "", base)


def integer(word: str, base: int = 10) -> int | None:
    """The integer that a word is, or None; also for one past 64 bits, which no kernel writes and
    arithmetic may choke on."""
    try:
        found = int(word, base) if word.isascii() else None
    except ValueError:
        return None
    return found if found is None or abs(found) < 1 << 64 else None


def whole(word: str) -> int | None:
    """The number that a word of digits alone is, or None."""
    return integer(word) if word.isdigit() else None


def names(source: Source, path: str) -> list[str]:
    """The names in a folder; none where it cannot be listed."""
    try:
        return source.listdir(path)
    except OSError:
        return []


def real(source: Source, path: str) -> str | None:
    """The path without links, or None."""
    try:
        return source.realpath(path)
    except OSError:
        return None


def there(source: Source, path: str) -> bool:
    try:
        return source.exists(path)
    except OSError:
        return False


def bdfs_in(path: str) -> tuple[str, ...]:
    """The PCI addresses along a path of /sys/devices, root port first."""
    return tuple(part for part in path.split("/") if BDF.fullmatch(part))
