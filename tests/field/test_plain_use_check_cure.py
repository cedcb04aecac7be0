"""From plain use: a cure of `check` copies a file into / itself, where no file belongs."""

from __future__ import annotations

import pytest

from nobounce.checks.machine import Machine
from nobounce.checks.report import check_paths
from nobounce.config import Settings
from trees import Tree, ready_amd


class Rooted(Tree):
    """A machine whose only volume that can go direct is that of /."""

    def mount(self, point: str, *arguments: str, **options: bool) -> Tree:
        return super().mount("/" if point == "/data" else point, *arguments, **options)


@pytest.mark.parametrize(
    ("others", "sentence", "command"),
    [
        ((), "copy the file to /var/tmp", "cp -- /l/m /var/tmp/"),
        (("/var",), "copy the file to a folder on /", ""),
    ],
)
def test_a_file_is_advised_into_a_folder(others: tuple[str, ...], sentence: str, command: str) -> None:
    tree = ready_amd(Rooted()).loop("loop0", "/i").mount("/l", "xfs", "loop0").file("/l/m")
    for point in others:
        tree.mount(point, "xfs", "loop0")
    (found,) = check_paths(Machine(tree, Settings()), ["/l/m"], ["hip:0"])
    assert found.cure is not None
    assert (found.cure.sentence, found.cure.command) == (sentence, command)
