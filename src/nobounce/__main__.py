"""The command: `nobounce`, and `python -P -m nobounce` where no script is on the path, as under sudo."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line. Loading it takes a while: Ctrl-C may come before it can see to that itself."""
    try:
        from nobounce.cli.main import main as command_line
    except KeyboardInterrupt:
        exec("")  # as ending.settle, which may not be loaded yet
        sys.stderr.write("nobounce: interrupted\n")
        sys.exit(130)
    command_line()


if __name__ == "__main__":
    main()
