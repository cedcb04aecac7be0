"""nobounce diff: whether two models hold the same tensors, and which are not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from nobounce.cli.options import Json
from nobounce.cli.output import DONE, NOT_MET, document, emit_json, progress, run, say
from nobounce.errors import counted, printable

if TYPE_CHECKING:
    from nobounce.formats.difference import Difference

UNREADABLE = 3
"""Exit code: a model could not be read, so nothing is known."""


def _described(difference: Difference) -> dict[str, Any]:
    """A difference as --json shows it."""
    fields: dict[str, Any] = {"name": difference.name, "kind": difference.kind}
    if difference.kind != "values":
        return {**fields, "a": difference.a or None, "b": difference.b or None}
    return {
        **fields,
        "count": difference.count,
        "total": difference.total,
        "first": list(difference.first),
        "most": difference.most,
    }


def command(
    a: Annotated[str, typer.Argument(metavar="A", help="A file, a folder or an index.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one, of any format.")],
    as_json: Json = False,
) -> None:
    """Compare two models: names, types, shapes, and values bit by bit.

    Ends with 0 if they are equal, 1 if they differ, 3 if one cannot be read.
    """

    def action() -> int:
        from nobounce.formats.difference import compare
        from nobounce.formats.modelsource import ModelSource

        with ModelSource(a) as one, ModelSource(b) as other:
            both = one.sources.keys() & other.sources.keys()
            with progress(sum(one.sources[n].nbytes for n in both), "diff") as advance:
                found = list(compare(one, other, advance))
            one.check()
            other.check()
        code = NOT_MET if found else DONE
        if as_json:
            emit_json(
                document(
                    "diff", exit_code=code, compared=len(both), differences=[_described(d) for d in found]
                )
            )
            return code
        for difference in found:
            say(f"{printable(difference.name)}: {printable(str(difference))}")
        differing = len({d.name for d in found})
        say(
            f"{counted(differing, 'tensor')} differ"
            if found
            else f"equal: {counted(len(both), 'tensor')}, every bit"
        )
        return code

    raise typer.Exit(run("diff", as_json, action, failed=UNREADABLE))
