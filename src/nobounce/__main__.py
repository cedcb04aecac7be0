"""The command: `nobounce`, and `python -P -m nobounce` where no script is on the path, as under sudo."""

from __future__ import annotations

from nobounce.cli import early


def main() -> None:
    """Run the command line. Loading it takes a while: Ctrl-C may come before it can see to that itself."""
    early.begin()
    from nobounce.cli.main import main as command_line

    command_line()


if __name__ == "__main__":
    main()
