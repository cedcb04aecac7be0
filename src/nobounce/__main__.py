"""`python -m nobounce`: the command line where no script is on the path, as under sudo."""

from __future__ import annotations

from nobounce.cli.main import main

main()
