"""nobounce config: the settings in force, where each comes from, and the devices that work."""

from __future__ import annotations

import typer

from nobounce.cli.options import Json
from nobounce.cli.output import DONE, document, emit_json, run, say, table
from nobounce.errors import printable


def command(as_json: Json = False) -> None:
    """Print every setting in force and the variable that set it, and which devices work."""

    def action() -> int:
        from nobounce.config import VARIABLES, settings
        from nobounce.device import devices, unavailable

        current = settings()
        origin = dict(current.origin)
        rows = []
        for v in VARIABLES:
            source = "environment" if origin.get(v.field) == v.name else "default"
            rows.append([v.name, str(getattr(current, v.field)) or "-", source, v.help])
        working, absent = [d.name for d in devices()], unavailable()
        if as_json:
            values = [
                {"name": r[0], "value": getattr(current, v.field), "origin": r[2], "help": r[3]}
                for r, v in zip(rows, VARIABLES, strict=True)
            ]
            emit_json(document("config", variables=values, devices=working, unavailable=absent))
        else:
            shown = [[printable(cell) for cell in row] for row in rows]
            say(table(["VARIABLE", "VALUE", "FROM", "MEANING"], shown))
            say("\ndevices: " + ", ".join(working))
            for why in absent.values():
                say(f"  {printable(why)}")
        current.check_contradiction()
        return DONE

    raise typer.Exit(run("config", as_json, action))
