"""hipFile's ais-check (section G) as `nobounce check` keeps it: items K-197 to K-209."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from nobounce.checks import report
from nobounce.checks.components import amdgpu, capable_volume, hip_runtime, kernel_p2pdma
from nobounce.checks.findings import Volume
from nobounce.checks.machine import Machine
from nobounce.checks.volumes import Volumes, capable, file_system_fits, label
from nobounce.cli import check
from nobounce.cli.main import app
from nobounce.config import Settings
from nobounce.facts.block import block_by_name, peer
from nobounce.facts.kernel import parse_dkms
from nobounce.facts.libraries import ask_child
from nobounce.facts.source import LiveSource, Source
from nobounce.facts.types import Known
from nobounce.facts.virtual import _ASK, amdsmi_gpus, guests, parse_smi
from trees import Tree, ready_amd

RELEASE = "6.8.0-45-generic"


def machine(source: Source) -> Machine:
    return Machine(source, Settings())


@pytest.mark.parametrize(
    ("fstype", "journal", "fits"),
    [
        ("xfs", None, True),
        ("ext4", "ordered", True),
        ("ext4", None, True),
        ("ext4", "journal", False),
        ("ext4", "writeback", False),
        ("ext4", "none", False),
        ("btrfs", None, False),
        ("vfat", None, False),
    ],
)
def test_K197_file_system_rules(fstype: str, journal: str | None, fits: bool) -> None:
    assert file_system_fits(fstype, journal) is fits
    for o_direct in ("yes", "no", "unknown"):
        assert capable(fits, "yes", o_direct) == (o_direct if fits else "no")  # type: ignore[arg-type]


def test_K198_label() -> None:
    assert label("ext4", "journal") == "ext4 (journal)"
    assert label("ext4", None) == "ext4 (ordered)"
    assert label("xfs", None) == "xfs"


def _raid1(t: Tree) -> Tree:
    t.nvme("nvme1n1", "0000:04:00.0")
    t.lvm("dm-1", "nvme0n1").lvm("dm-2", "nvme1n1")
    return t.lvm("dm-0", "dm-1", "dm-2")


LVM_TREES = {
    "one nvme": (lambda t: t.lvm("dm-0", "nvme0n1"), "yes"),
    "a partition": (lambda t: t.partition("nvme0n1p3", "nvme0n1").lvm("dm-0", "nvme0n1p3"), "yes"),
    "raid1 over two nvme": (_raid1, "yes"),
    "nested": (lambda t: t.lvm("dm-2", "nvme0n1").lvm("dm-1", "dm-2").lvm("dm-0", "dm-1"), "yes"),
    "a multipath leaf": (
        lambda t: t.disk("sda").mapped("dm-1", "mpath-3600", "sda").lvm("dm-0", "nvme0n1", "dm-1"),
        "no",
    ),
    "a scsi leaf": (lambda t: t.disk("sda").lvm("dm-0", "nvme0n1", "sda"), "no"),
    "slaves that cannot be read": (lambda t: t.lvm("dm-0"), "unknown"),
}


@pytest.mark.parametrize("name", LVM_TREES)
def test_K199_lvm_trees(name: str) -> None:
    build, expected = LVM_TREES[name]
    tree = Tree().nvme("nvme0n1", "0000:03:00.0")
    build(tree)  # type: ignore[no-untyped-call]
    node = block_by_name(tree, "dm-0")
    assert node is not None
    assert node.backing == "lvm"
    assert peer(node)[0] == expected


BACKINGS = {
    "nvme0n1": ("nvme", "yes"),
    "nvme0n1p1": ("nvme", "yes"),
    "dm-0": ("lvm", "yes"),
    "dm-1": ("crypt", "no"),
    "dm-2": ("mpath", "no"),
    "dm-3": ("dm", "no"),
    "md0": ("md", "no"),
    "loop0": ("loop", "no"),
    "vda": ("virtio", "no"),
    "xvda": ("virtio", "no"),
    "sda": ("scsi", "no"),
    "sr0": ("scsi", "no"),
    "pmem0": ("pmem0", "no"),
}


@pytest.mark.parametrize("name", BACKINGS)
def test_K200_backing_rules(name: str) -> None:
    tree = Tree().nvme("nvme0n1", "0000:03:00.0").partition("nvme0n1p1", "nvme0n1").lvm("dm-0", "nvme0n1")
    tree.mapped("dm-1", "CRYPT-LUKS2-x", "nvme0n1").mapped("dm-2", "mpath-1", "nvme0n1")
    tree.mapped("dm-3", "", "nvme0n1").md("md0", "raid0", "nvme0n1").loop("loop0", "/x.img")
    for disk in ("vda", "xvda", "sda", "sr0", "pmem0"):
        tree.disk(disk)
    node = block_by_name(tree, name)
    assert node is not None
    assert (node.backing, peer(node)[0]) == BACKINGS[name]


def test_K200_unknown_backing_is_a_question_mark_and_unverified() -> None:
    tree = Tree().mount("/x", "xfs", "/dev/gone")
    (row,) = Volumes(machine(tree)).rows
    assert (row.backing, row.hipfile) == ("?", "unknown")


def test_K201_collect_skips_pseudo_and_network_and_probes_only_hipfiles_file_systems() -> None:
    tree = Tree().nvme("nvme0n1", "0000:03:00.0").nvme("nvme1n1", "0000:04:00.0")
    tree.mount("/a b", "xfs", "nvme0n1").mount("/b", "btrfs", "nvme1n1", anonymous=True)
    for fstype in ("tmpfs", "overlay", "proc", "squashfs"):
        tree.mount(f"/{fstype}", fstype, "/dev/nvme0n1" if fstype == "squashfs" else fstype)
    tree.mount("/nfs", "nfs4", "server:/export").mount("/fuse", "fuse.sshfs", "host:/dir")
    rows = Volumes(machine(tree)).rows
    assert [r.mount_point for r in rows] == ["/a b", "/b"]
    probed = [key for question, key in tree.asked if question == "probe:direct_in"]
    assert probed == [("/a b",)]
    assert rows[1].o_direct == "unknown"
    assert rows[1].hipfile == "no"


@pytest.mark.parametrize(
    ("answers", "expected"),
    [(["no", "yes"], "yes"), (["no", "unknown"], "unknown"), (["no", "no"], "no"), ([], "no")],
)
def test_K202_any_capable_volume_is_enough(answers: list[Known], expected: Known) -> None:
    rows = [Volume(f"/{i}", "xfs", "nvme0n1", "nvme", "yes", a, "/sys/x") for i, a in enumerate(answers)]
    assert capable_volume(rows).answer == expected


PLACES = (f"/boot/config-{RELEASE}", f"/lib/modules/{RELEASE}/build/.config", "/proc/config.gz")


@pytest.mark.parametrize("place", PLACES)
def test_K203_each_config_source_counts(place: str) -> None:
    found = kernel_p2pdma(machine(Tree().kernel("PCI_P2PDMA", path=place)))
    assert (found.answer, found.read_from) == ("yes", place)


def test_K203_a_yes_in_a_later_source_beats_a_no_and_a_module_does_not_count() -> None:
    tree = Tree().kernel(path=PLACES[0])
    assert kernel_p2pdma(machine(tree)).answer == "no"
    assert kernel_p2pdma(machine(tree.kernel("PCI_P2PDMA", path=PLACES[2]))).answer == "yes"
    modular = Tree().answer("kernel_config", PLACES[0], "PCI_P2PDMA", value=["CONFIG_PCI_P2PDMA=m"])
    assert kernel_p2pdma(machine(modular)).answer == "no"


def test_K203_no_source_is_a_note_and_not_true() -> None:
    found = kernel_p2pdma(machine(Tree()))
    assert found.answer == "unknown"
    assert "configuration" in found.note


DKMS = {
    "new style": (f"amdgpu/6.8.5-2041575.22.04, {RELEASE}, x86_64: installed\n", 2041575),
    "old style": (f"amdgpu, 6.8.5-2041575.22.04, {RELEASE}, x86_64: installed\n", 2041575),
    "the running kernel's entry": (
        f"amdgpu/6.16-2400000, 6.8.0-99-generic, x86_64: installed\namdgpu/6.8.5-2041575, {RELEASE}, x86_64: installed\n",
        2041575,
    ),
    "else the largest": ("amdgpu/6.8.5-1, 5.0, x86_64: built\namdgpu/6.8.5-7, 5.1, x86_64: built\n", 7),
    "added only": ("amdgpu/6.8.5-2041575.22.04: added\n", 2041575),
    "other modules": ("zfs/2.1.5-1ubuntu6, 6.8.0-45-generic, x86_64: installed\n", None),
    "no build number": ("amdgpu/6.8.5, 6.8.0-45-generic, x86_64: installed\n", None),
    "nothing": ("", None),
    "noise": ("amdgpu\n\x00\xff: , -\namdgpu/-, x\n", None),
}


@pytest.mark.parametrize("name", DKMS)
def test_K204_dkms_formats(name: str) -> None:
    text, build = DKMS[name]
    assert parse_dkms(text, RELEASE) == build


def test_K204_a_missing_dkms_program_is_no_build() -> None:
    assert machine(Tree().answer("dkms_status", "amdgpu", value=OSError(errno.ENOENT, ""))).dkms_build is None
    if not any(
        os.access(os.path.join(d, "dkms"), os.X_OK) for d in ("/usr/sbin", "/usr/bin", "/sbin", "/bin")
    ):
        assert machine(LiveSource()).dkms_build is None


def _trusted(build: int, *, ais: bool = False, gpu_id: int = 7, **more: int) -> Tree:
    tree = Tree().amdgpu(dkms=f"amdgpu/6.16-{build}, {RELEASE}, x86_64: installed\n").kernel("PCI_P2PDMA")
    return tree.kfd_node(0).kfd_node(1, gpu_id=gpu_id, ais=ais, **more)


def test_K205_the_topology_bit_of_any_gpu_node() -> None:
    assert kernel_p2pdma(machine(_trusted(2327937, ais=True))).answer == "yes"
    assert kernel_p2pdma(machine(_trusted(2327937))).answer == "no"
    assert (
        kernel_p2pdma(machine(_trusted(2327937, ais=True, gpu_id=0))).answer == "no"
    )  # a CPU's word means nothing
    two = _trusted(2327937).kfd_node(2, gpu_id=8, ais=True)
    assert kernel_p2pdma(machine(two)).read_from.endswith("/nodes/2/properties")


def test_K206_the_threshold_is_exclusive() -> None:
    at = kernel_p2pdma(machine(_trusted(2327936)))
    assert (at.answer, at.read_from) == ("yes", PLACES[0])  # the configuration decides, not the bit
    assert kernel_p2pdma(machine(_trusted(2327937))).answer == "no"


FAKE_AMDSMI = """
import enum
class Mode(enum.IntEnum):
    UNKNOWN = 0
    BAREMETAL = 1
    HOST = 2
    GUEST = 3
    PASSTHROUGH = 4
def amdsmi_init():
    {init}
def amdsmi_shut_down():
    pass
def amdsmi_get_processor_handles():
    return list(range(5))
def amdsmi_get_gpu_device_bdf(handle):
    if handle == {no_bdf}:
        raise RuntimeError("no bdf")
    return f"0000:0{{handle}}:00.0"
def amdsmi_get_gpu_asic_info(handle):
    return {{"market_name": f"Card {{handle}}"}}
def amdsmi_get_gpu_virtualization_mode(handle):
    if handle == {no_mode}:
        raise RuntimeError("no mode")
    return {{"mode": Mode(handle)}}
"""


def _amdsmi(folder: Path, **change: object) -> object:
    values = {"init": "pass", "no_bdf": -1, "no_mode": -1, **change}
    (folder / "amdsmi.py").write_text(FAKE_AMDSMI.format(**values))
    return ask_child(_ASK, str(folder))


def test_K207_only_guests_are_virtual_functions(tmp_path: Path) -> None:
    found = parse_smi(_amdsmi(tmp_path))
    assert found is not None
    assert [g.mode for g in found] == ["UNKNOWN", "BAREMETAL", "HOST", "GUEST", "PASSTHROUGH"]
    assert [g.label for g in guests(found)] == ["0000:03:00.0 (Card 3)"]


def test_K207_index_stands_in_for_a_missing_address(tmp_path: Path) -> None:
    found = parse_smi(_amdsmi(tmp_path, no_bdf=3))
    assert [g.label for g in guests(found)] == ["gpu 3 (Card 3)"]


def test_K207_failures_are_silently_none(tmp_path: Path) -> None:
    assert parse_smi(_amdsmi(tmp_path, init="raise RuntimeError('no driver')")) is None
    assert guests(parse_smi(_amdsmi(tmp_path, no_mode=3))) == []
    assert amdsmi_gpus(Tree()) is None
    (tmp_path / "amdsmi.py").write_text("raise KeyError('library')")
    assert parse_smi(ask_child(_ASK, str(tmp_path))) is None
    for odd in ("text", 7, {"bdf": 1}, [1, "x"]):
        assert not guests(parse_smi(odd))


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    def run(tree: Tree, *arguments: str) -> Result:
        monkeypatch.setattr(check, "LiveSource", lambda: tree)
        return CliRunner().invoke(app, ["check", *arguments])

    return run


def _virtual() -> Tree:
    return ready_amd().answer("amdsmi", value=[{"bdf": "0000:C1:00.0", "name": "MI300X VF", "mode": "GUEST"}])


def test_K208_the_warning_goes_to_stderr_alone_even_when_quiet(on) -> None:  # type: ignore[no-untyped-def]
    for arguments in ([], ["-q"], ["--json"]):
        done = on(_virtual(), *arguments)
        assert "0000:c1:00.0 (MI300X VF)" in done.stderr
        assert "SR-IOV virtual function(s)" not in done.stdout.replace('"SR-IOV', "")
        assert done.exit_code == 0, "virtual functions do not change hipFile's exit code (G-3)"
    assert on(_virtual(), "-q").stdout == ""
    assert "SR-IOV" not in on(ready_amd()).stderr


def test_K209_quiet_verbose_and_exit_codes(on) -> None:  # type: ignore[no-untyped-def]
    assert on(ready_amd()).exit_code == 0
    assert on(ready_amd(), "-q").stdout == ""
    loud = on(ready_amd(), "-v")
    assert "/opt/rocm/lib/libamdhip64.so.7 (AIS supported)" in loud.stdout
    assert "libamdhip64" not in on(ready_amd()).stdout
    without = ready_amd().hip_library(ais=False)
    assert on(without).exit_code == 1
    assert "(AIS NOT supported" in on(without, "-v").stdout
    assert on(ready_amd(), "-q", "-v").exit_code == 2


def test_K209_the_four_lines_in_hipfiles_order(on) -> None:  # type: ignore[no-untyped-def]
    lines = on(ready_amd()).stdout.splitlines()
    start = lines.index("AIS support in:")
    names = [line.partition(":")[0].strip() for line in lines[start + 1 : start + 5]]
    assert names == ["Kernel P2PDMA support", "HIP runtime", "amdgpu", "hipFile-capable volume"]
    assert all(line.endswith(": True") for line in lines[start + 1 : start + 5])
    assert lines[0] == ""
    assert lines[1].startswith("Linux testhost 6.8.0")
    assert "Mounted volumes:" in lines
    empty = on(Tree()).stdout
    assert "No block-backed volumes found." in empty


@pytest.mark.parametrize("part", ["kernel", "hip", "amdgpu", "volume"])
def test_K209_each_component_can_fail_alone(part: str) -> None:
    tree = ready_amd()
    if part == "kernel":
        tree.kernel()
    elif part == "hip":
        tree.hip_library(ais=False)
    elif part == "amdgpu":
        tree.amdgpu(symbol=False)
    else:
        tree.answer("direct_in", "/data", value=[errno.EINVAL, 0, 0])
    found = report.survey(machine(tree), [])
    assert [c.answer for c in found.components].count("no") == 1
    assert found.exit_code == 1


def test_K206_amdgpu_hidden_from_this_user_is_unknown_and_3() -> None:
    tree = ready_amd().amdgpu(symbol=None)
    tree.uid = 1000
    assert amdgpu(machine(tree)).answer == "unknown"
    found = report.survey(machine(tree), [])
    assert found.exit_code == 3
    assert any("-m nobounce check" in w and "sudo " in w for w in found.warnings)
    tree.uid = 0
    assert not any("sudo" in w for w in report.survey(machine(tree), []).warnings)
    tree.uid = 1000
    assert hip_runtime(machine(tree)).answer == "yes"
    assert json.dumps(report.survey_data(report.survey(machine(tree), [])))
