"""nobounce hipify: rewrite sources for cuFile, kvikio and the CUDA runtime into ones for nobounce or HIP."""

from __future__ import annotations

import enum
import os
import sys
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nobounce.cli.options import Json
from nobounce.cli.output import DONE, NOT_MET, complain, document, emit_json, error_fields, run, say, table
from nobounce.errors import ArgumentError, FormatError, NobounceError, counted, named, named_errors, printable

if TYPE_CHECKING:
    from nobounce.hipify.convert import Source

UNKNOWN = 3
"""The exit code of --check where nothing would change but a file could not be read (docs/hipify.md)."""


class TargetOption(enum.StrEnum):
    nobounce = "nobounce"
    hip = "hip"


class LanguageOption(enum.StrEnum):
    python = "python"
    c = "c"


@dataclass(slots=True)
class _File:
    """One file and what became of it."""

    path: str
    source: Source | None = None
    error: NobounceError | None = None

    @property
    def changed(self) -> bool:
        return self.source is not None and self.source.changed

    def to_dict(self, diff: str | None) -> dict[str, Any]:
        if self.source is None:
            return (
                {"path": self.path, "error": error_fields(self.error)} if self.error else {"path": self.path}
            )
        done = self.source.converted
        fields: dict[str, Any] = {
            "path": self.path,
            "changed": self.changed,
            "rewritten": dict(sorted(done.counts.items())),
            "left": [{"line": x.line, "name": x.name, "reason": x.reason} for x in done.left],
            "look_at": [{"line": x.line, "why": x.text} for x in done.notes],
        }
        if diff is not None:
            fields["diff"] = diff
        if self.error is not None:
            fields["error"] = error_fields(self.error)
        return fields


def command(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...",
            help="Sources, and folders with all sources in them; - reads stdin and writes stdout.",
            show_default=False,
        ),
    ],
    to: Annotated[
        TargetOption, typer.Option(help="What Python sources are to use. C and C++ always get HIP.")
    ] = TargetOption.nobounce,
    diff: Annotated[bool, typer.Option("--diff", help="Print unified diffs and write nothing.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit code 1 if something would change.")
    ] = False,
    language: Annotated[
        LanguageOption | None,
        typer.Option(help="Of stdin and of files whose suffix says nothing. Default: Python for stdin."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Rewrite sources that use cuFile's bindings, kvikio, the CUDA runtime or torch.cuda.gds;
    list what is left, and why."""
    piped = files == ["-"]

    def action() -> int:
        from nobounce.hipify.folders import sources

        if "-" in files and not piped:
            raise ArgumentError("- stands for stdin and goes with no other file")
        if piped and as_json and not (diff or check):
            raise ArgumentError("- writes the source to stdout: --json goes with --check or --diff there")
        every = [_File(path) for path in (files if piped else sources(files))]
        for file in every:
            try:
                _convert(file, piped, to, language)
                if file.changed and not (diff or check or piped):
                    _write(file)
            except NobounceError as e:
                file.error = e
                if not as_json:
                    complain(f"nobounce hipify: {printable(str(e))}")
            if diff and not as_json and file.changed:
                _emit(_diff(file))
            elif piped and not (diff or check) and file.source is not None:
                _emit(file.source.data)
        if as_json:
            diffs = [_diff(f).decode("utf-8", "backslashreplace") if diff else None for f in every]
            emit_json(
                document(
                    "hipify",
                    to=to.value,
                    written=not (diff or check),
                    files=[f.to_dict(d) for f, d in zip(every, diffs, strict=True)],
                    **_totals(every),
                )
            )
        else:
            _report(every, complain if diff or piped else say, written=not (diff or check))
        return _code(every, check)

    raise typer.Exit(run("hipify", as_json, action))


def _convert(file: _File, piped: bool, to: TargetOption, language: LanguageOption | None) -> None:
    """Raises FormatError, FileError, ArgumentError and UnavailableError, each naming the file."""
    from nobounce.hipify.convert import MOST_NBYTES, convert, language_of

    data = sys.stdin.buffer.read(MOST_NBYTES + 1) if piped else _read(file.path, MOST_NBYTES + 1)
    name = "standard input" if piped else file.path
    if len(data) > MOST_NBYTES:
        raise FormatError(f"it is larger than {MOST_NBYTES >> 20} MiB, which no source is", filename=name)
    found = language_of(file.path, data) if not piped else None
    chosen = found or (language.value if language is not None else "python" if piped else None)
    if chosen is None:
        raise ArgumentError(f"{named(name)}: its suffix names no language: give one with --language")
    try:
        file.source = convert(data, "c" if chosen == "c" else "python", to.value)
    except FormatError as e:
        raise FormatError(e.reason, filename=name) from None


def _read(path: str, most: int) -> bytes:
    from nobounce.facts.regular import opener

    with named_errors(path, "read"), open(path, "rb", opener=opener) as f:
        return f.read(most)


def _write(file: _File) -> None:
    from nobounce.outfile import create

    if file.source is None:
        return
    with create(file.path) as out:
        out.write(file.source.data)
        out.commit()


def _emit(data: bytes) -> None:
    """Bytes on stdout: as they are where a program reads them, escaped on a terminal."""
    if sys.stdout.isatty():
        say(data.decode("utf-8", "backslashreplace").rstrip("\n"))
        return
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _diff(file: _File) -> bytes:
    """A unified diff that patch(1) takes; empty where nothing changes."""
    import difflib

    if file.source is None or not file.changed:
        return b""
    name = os.fsencode(printable(file.path)) if file.path != "-" else b"stdin"
    old, new = (data.splitlines(keepends=True) for data in (file.source.old, file.source.data))
    lines = difflib.diff_bytes(difflib.unified_diff, old, new, name, name)
    return b"".join(
        x if x.endswith(b"\n") else x + b"\n\\ No newline at end of file\n" if x[:1] in b"+- " else x
        for x in lines
    )


def _totals(files: list[_File]) -> dict[str, Any]:
    done = [f.source.converted for f in files if f.source is not None]
    return {
        "changed": sum(f.changed for f in files),
        "kinds": dict(sorted(sum((d.kinds() for d in done), Counter[str]()).items())),
        "left": sum(len(d.left) for d in done),
        "errors": sum(f.error is not None for f in files),
    }


def _report(files: list[_File], tell: Any, *, written: bool) -> None:
    for file in files:
        if file.source is None:
            continue
        done, path = file.source.converted, named(file.path)
        for left in done.left:
            tell(f"{path}:{left.line}: left: {printable(left.name)}: {printable(left.reason)}")
        for text in dict.fromkeys(n.text for n in done.notes):
            lines = [n.line for n in done.notes if n.text == text]
            more = f" (and {counted(len(lines) - 1, 'more line')})" if len(lines) > 1 else ""
            tell(f"{path}:{lines[0]}: look: {printable(text)}{more}")
    totals = _totals(files)
    rows = [[printable(name), str(count)] for name, count in totals["kinds"].items()]
    if rows:
        tell(table(["REWRITTEN", "COUNT"], rows, right=frozenset({1})))
    verb = "changed" if written else "would change"
    tell(
        f"{counted(len(files), 'file')}: {totals['changed']} {verb}, "
        f"{counted(sum(totals['kinds'].values()), 'place')} rewritten, {totals['left']} left"
        + (f", {counted(totals['errors'], 'error')}" if totals["errors"] else "")
    )


def _code(files: list[_File], check: bool) -> int:
    failed = any(f.error is not None for f in files)
    if check:
        return NOT_MET if any(f.changed for f in files) else UNKNOWN if failed else DONE
    return NOT_MET if failed else DONE
