"""Access Control Services as configuration space tells them."""

from __future__ import annotations

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nobounce.facts.acs import NAMES, acs_control, between, names_of
from nobounce.facts.pci import pci_device
from trees import ROOT_PORT, Tree

DISK, GPU, SWITCH, UPPER, LOWER = (f"0000:{n:02x}:00.0" for n in (3, 0xC1, 2, 0x0A, 0x0B))


def tree() -> Tree:
    return Tree().pci(DISK, ROOT_PORT)


def config(content: str) -> int | None:
    one = tree()
    one.put(f"{one.pci_path(ROOT_PORT)}/config", content)
    return acs_control(one, ROOT_PORT)


@given(st.integers(0, 0xFFFF))
def test_the_control_register_is_read_wherever_the_capability_is(control: int) -> None:
    assert acs_control(tree().acs(ROOT_PORT, control), ROOT_PORT) == control


def test_a_function_without_acs_controls_nothing() -> None:
    assert acs_control(tree().acs(ROOT_PORT, None), ROOT_PORT) == 0


@pytest.mark.parametrize(
    ("content", "control"),
    [
        ("", None),
        ("\0" * 64, None),  # what an unprivileged user reads
        ("\0" * 256, 0),  # a PCI function, which has no more
        ("\x02\x10\0\0\0\0\x10".ljust(0x34, "\0") + "\x40".ljust(12, "\0") + "\x10".ljust(192, "\0"), None),
        ("\xff" * 4096, None),  # asleep, or gone
        ("\1\0\0\0" + "\0" * 252 + "\xff" * 3840, None),
        ("\1\0\0\0" + "\0" * 252 + "\x01\0\x02\x10" + "\0" * 3836, 0),  # a list that leads back to itself
        ("\1\0\0\0" + "\0" * 252 + "\x0d\0\x01\0", 0),  # cut off in the middle
    ],
)
def test_spaces_of_other_shapes(content: str, control: int | None) -> None:
    assert config(content) == control


def test_a_space_that_cannot_be_read_is_not_known() -> None:
    one = tree()
    assert acs_control(one, ROOT_PORT) is None
    one.fail(f"{one.pci_path(ROOT_PORT)}/config", errno.EACCES)
    assert acs_control(one, ROOT_PORT) is None


@given(st.binary(max_size=600))
def test_any_bytes_are_survived(content: bytes) -> None:
    found = config(content.decode("latin-1"))
    assert found is None or 0 <= found < 1 << 16


def test_every_bit_has_its_name_and_only_those_between_peers_are_named() -> None:
    assert sorted(NAMES) == [1, 2, 4, 8, 16, 32, 64]
    assert names_of(0x7F) == "P2P Request Redirect, P2P Completion Redirect, P2P Egress Control"
    assert names_of(0x53) == ""


@pytest.mark.parametrize(
    ("disk", "gpu", "expected"),
    [
        ((SWITCH, UPPER), (SWITCH, LOWER), {DISK, UPPER, GPU, LOWER, SWITCH}),
        ((SWITCH,), (SWITCH,), {DISK, GPU, SWITCH}),
        ((), (), {DISK, GPU, ROOT_PORT}),
        ((SWITCH,), (SWITCH, UPPER, LOWER), {DISK, GPU, UPPER, LOWER, SWITCH}),
    ],
)
def test_the_functions_between_two_peers(
    disk: tuple[str, ...], gpu: tuple[str, ...], expected: set[str]
) -> None:
    one = Tree().pci(DISK, ROOT_PORT, *disk).pci(GPU, ROOT_PORT, *gpu)
    a, b = pci_device(one, DISK), pci_device(one, GPU)
    assert a is not None
    assert b is not None
    assert set(between(a, b)) == set(between(b, a)) == expected
    assert len(between(a, b)) == len(expected)


def test_below_different_host_bridges_nothing_is_above_both() -> None:
    one = Tree().pci(DISK, ROOT_PORT).pci(GPU, "0000:80:01.0", root="pci0000:80")
    a, b = pci_device(one, DISK), pci_device(one, GPU)
    assert a is not None
    assert b is not None
    assert set(between(a, b)) == {DISK, ROOT_PORT, GPU, "0000:80:01.0"}
