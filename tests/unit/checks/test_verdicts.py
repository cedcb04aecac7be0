"""Verdicts: every block stack, device and trap on generated machines, and the one judge."""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nobounce.checks.direct import CPU, CUDA_DIRECT, HIP, SIM, view_of
from nobounce.checks.files import look
from nobounce.checks.findings import EXIT_CODES, Verdict, worst
from nobounce.checks.machine import Machine
from nobounce.checks.report import check_paths
from nobounce.checks.verdict import outcome, read_request
from nobounce.checks.volumes import Volumes
from nobounce.config import Settings
from nobounce.errors import RouteError
from nobounce.route.judge import judge
from nobounce.route.scores import hard_refusals
from nobounce.runtimes.base import DeviceInfo
from nobounce.runtimes.gpu.amdfile import AmdFileDirect
from nobounce.runtimes.gpu.cufile import CuFileDirect
from trees import GIB, ROOT_PORT, Tree, ready_amd

Build = Callable[[Tree], Tree]


def verdict(tree: Tree, path: str = "/data/model.bin", device: str = "hip:0", **settings: bool) -> Verdict:
    (found,) = check_paths(Machine(tree, Settings(**settings)), [path], [device])  # type: ignore[arg-type]
    return found


def codes(found: Verdict) -> list[str]:
    return [f.code for f in found.decided_by]


def test_a_machine_that_has_everything_is_fastpath_and_every_finding_names_where_it_was_read() -> None:
    found = verdict(ready_amd())
    assert (found.verdict, found.exit_code, found.cure, found.direct_to) == ("fastpath", 0, None, "device")
    assert {"file", "file system", "block", "pci", "iommu", "kernel", "driver", "runtime"} <= {
        f.layer for f in found.findings
    }
    for finding in found.findings:
        assert finding.read_from
        assert finding.answer == "yes"
    assert [f.layer for f in found.findings].index("block") < [f.layer for f in found.findings].index(
        "kernel"
    )


STACKS: dict[str, tuple[Build, str, str]] = {
    "nvme": (lambda t: t.nvme("nvme5n1", "0000:05:00.0"), "nvme5n1", "fastpath"),
    "partition": (
        lambda t: t.nvme("nvme5n1", "0000:05:00.0").partition("nvme5n1p2", "nvme5n1"),
        "nvme5n1p2",
        "fastpath",
    ),
    "lvm": (lambda t: t.nvme("nvme5n1", "0000:05:00.0").lvm("dm-0", "nvme5n1"), "dm-0", "fastpath"),
    "lvm over crypt": (
        lambda t: t.mapped("dm-1", "CRYPT-LUKS2-x", "nvme0n1").lvm("dm-0", "dm-1"),
        "dm-0",
        "fallback",
    ),
    "crypt": (lambda t: t.mapped("dm-0", "CRYPT-LUKS2-x", "nvme0n1"), "dm-0", "fallback"),
    "crypt over lvm": (
        lambda t: t.lvm("dm-1", "nvme0n1").mapped("dm-0", "CRYPT-LUKS2-x", "dm-1"),
        "dm-0",
        "fallback",
    ),
    "multipath": (lambda t: t.disk("sda").mapped("dm-0", "mpath-36", "sda"), "dm-0", "fallback"),
    "striped dm": (lambda t: t.mapped("dm-0", "", "nvme0n1"), "dm-0", "fallback"),
    "md": (lambda t: t.md("md0", "raid1", "nvme0n1"), "md0", "fallback"),
    "lvm over md": (lambda t: t.md("md0", "raid1", "nvme0n1").lvm("dm-0", "md0"), "dm-0", "fallback"),
    "loop": (lambda t: t.loop("loop0", "/img"), "loop0", "fallback"),
    "virtio": (lambda t: t.disk("vda"), "vda", "fallback"),
    "scsi": (lambda t: t.disk("sda"), "sda", "fallback"),
    "nvme over tcp": (lambda t: t.nvme_fabrics("nvme6n1", "tcp"), "nvme6n1", "fallback"),
    "nvme over rdma": (lambda t: t.nvme_fabrics("nvme6n1", "rdma"), "nvme6n1", "fallback"),
    "nvme one path": (
        lambda t: t.nvme_multipath("nvme8n1", ("pcie", "0000:08:00.0")),
        "nvme8n1",
        "fastpath",
    ),
    "nvme two paths": (
        lambda t: t.nvme_multipath("nvme8n1", ("pcie", "0000:08:00.0"), ("pcie", "0000:09:00.0")),
        "nvme8n1",
        "unknown",
    ),
    "nvme paths over tcp": (
        lambda t: t.nvme_multipath("nvme8n1", ("pcie", "0000:08:00.0"), ("tcp", "x")),
        "nvme8n1",
        "fallback",
    ),
}


@pytest.mark.parametrize("name", STACKS)
def test_every_block_stack(name: str) -> None:
    build, device, expected = STACKS[name]
    tree = build(ready_amd()).mount("/s", "xfs", device).file("/s/m")
    found = verdict(tree, "/s/m")
    assert found.verdict == expected
    if expected == "fallback":
        assert codes(found) == ["block-stack"]
        assert found.decided_by[0].read_from.startswith("/sys/")
        assert found.cure is not None
        assert found.cure.command == "cp -- /s/m /data/"
        assert ("if it may lie unencrypted there" in found.cure.sentence) == ("crypt" in name)
        assert ("without MD RAID" in found.cure.sentence) == ("md" in name.split())


@pytest.mark.parametrize("name", STACKS)
def test_on_cpu_a_stack_may_be_anything_and_direct_means_host_memory(name: str) -> None:
    build, device, _ = STACKS[name]
    found = verdict(build(ready_amd()).mount("/s", "xfs", device).file("/s/m"), "/s/m", "cpu")
    assert (found.verdict, found.direct_to) == ("fastpath", "host")


@pytest.mark.parametrize("name", STACKS)
def test_no_cure_gives_up_encryption_or_redundancy(name: str) -> None:
    build, device, _ = STACKS[name]
    tree = build(
        Tree().cpu().kernel("PCI_P2PDMA").amdgpu().hip_library().amd_gpu().nvme("nvme0n1", "0000:03:00.0")
    )
    found = verdict(tree.mount("/s", "xfs", device).file("/s/m"), "/s/m")
    said = str(found.cure).lower()
    for word in (
        "cryptsetup",
        "luks",
        "decrypt",
        "mdadm",
        "--stop",
        "--fail",
        "lvconvert",
        "wipefs",
        "dmsetup",
    ):
        assert word not in said


def test_the_stacks_of_a_btrfs_of_two_devices_count_both() -> None:
    tree = (
        ready_amd()
        .disk("sda")
        .put("/sys/fs/btrfs/u-1/devices/nvme0n1", "")
        .put("/sys/fs/btrfs/u-1/devices/sda", "")
    )
    tree.mount("/b", "btrfs", "nvme0n1", anonymous=True).file("/b/m")
    seen = look(Machine(tree, Settings()), "/b/m")
    assert seen.facts is not None
    assert seen.facts.block is not None
    assert seen.facts.block.peer == "no"
    assert "sda" in seen.facts.block.because


@pytest.mark.parametrize(
    ("fstype", "data", "expected", "code"),
    [
        ("ext4", "ordered", "fastpath", ""),
        ("ext4", "journal", "fallback", "ext4-journal"),
        ("ext4", "writeback", "fallback", "ext4-journal"),
        ("ext4", "none", "fallback", "ext4-journal"),
        ("xfs", None, "fastpath", ""),
        ("btrfs", None, "fallback", "file-system"),
        ("overlay", None, "fallback", "file-system"),
        ("nfs4", None, "fallback", "file-system"),
    ],
)
def test_C101_file_systems_name_the_option(fstype: str, data: str | None, expected: str, code: str) -> None:
    tree = ready_amd().nvme("nvme5n1", "0000:05:00.0")
    device = "server:/export" if fstype == "nfs4" else "nvme5n1"
    found = verdict(
        tree.mount("/s", fstype, device, data=data, anonymous=fstype != "ext4").file("/s/m"), "/s/m"
    )
    assert found.verdict == expected
    assert codes(found) == ([code] if code else [])
    if code == "ext4-journal":
        assert f"data={data}" in found.decided_by[0].sentence
        assert found.decided_by[0].read_from == "/proc/fs/ext4/nvme5n1/options"


def test_the_journal_cure_is_the_mount_option_where_no_other_volume_helps() -> None:
    tree = Tree().cpu().kernel("PCI_P2PDMA").amdgpu().hip_library().amd_gpu().nvme("nvme5n1", "0000:05:00.0")
    found = verdict(tree.mount("/s", "ext4", "nvme5n1", data="writeback").file("/s/m"), "/s/m")
    assert found.cure is not None
    assert "mount -o data=ordered /dev/nvme5n1 /s" in found.cure.command


def test_C107_an_unknown_file_system_that_does_direct_io_is_direct_on_cpu() -> None:
    tree = ready_amd().mount("/z", "zfsish", "pool/x").file("/z/m", align=None, direct_read="yes")
    assert verdict(tree, "/z/m", "cpu").verdict == "fastpath"
    tree.file("/z/m", align=None, direct_read="no")
    assert codes(verdict(tree, "/z/m", "cpu")) == ["direct-io-unproven"]


def test_tmpfs_is_fallback_everywhere() -> None:
    tree = ready_amd().mount("/t", "tmpfs", "none").file("/t/m", align=None)
    for device in ("cpu", "hip:0", "sim:0"):
        found = verdict(tree, "/t/m", device)
        assert found.verdict == "fallback"
        assert "memory-file-system" in codes(found)


TRAPS: dict[str, tuple[Build, str, str]] = {
    "virtual function on the host": (
        lambda t: t.folder(f"{t.pci_path('0000:c1:00.0')}/physfn"),
        "fallback",
        "virtual-function",
    ),
    "virtual function in a guest": (
        lambda t: t.cpu(guest=True).answer("amdsmi", value=[{"bdf": "0000:c1:00.0", "mode": "GUEST"}]),
        "fallback",
        "virtual-function",
    ),
    "passed-through GPU in a guest": (
        lambda t: t.cpu(guest=True).answer("amdsmi", value=[{"bdf": "0000:c1:00.0", "mode": "PASSTHROUGH"}]),
        "fastpath",
        "",
    ),
    "a guest without amdsmi": (lambda t: t.cpu(guest=True), "unknown", "virtual-function"),
    "no calls in the HIP runtime": (lambda t: t.hip_library(ais=False), "fallback", "no-amd-file-calls"),
    "no P2PDMA in the kernel": (lambda t: t.kernel(), "fallback", "no-p2p"),
    "no kernel configuration": (
        lambda t: t.answer(
            "kernel_config", "/boot/config-6.8.0-45-generic", "PCI_P2PDMA", value=OSError(2, "")
        ),
        "unknown",
        "no-p2p",
    ),
    "an amdgpu without the path": (lambda t: t.amdgpu(symbol=False), "fallback", "missing-module"),
    "a new driver that says no": (
        lambda t: t.amdgpu(dkms="amdgpu/6.16-2400000, 6.8.0-45-generic, x86_64: installed"),
        "fallback",
        "no-p2p",
    ),
    "an IOMMU in between": (
        lambda t: t.pci("0000:03:00.0", ROOT_PORT, group=5, translated=True),
        "unknown",
        "iommu-translated",
    ),
    "an IOMMU in passthrough": (lambda t: t.pci("0000:03:00.0", ROOT_PORT, group=5), "fastpath", ""),
    "an unlisted host bridge": (
        lambda t: (
            t.cpu("GenuineIntel", 6)
            .link("/sys/bus/pci/devices/0000:00:00.0", "/sys/devices/pci0000:00/0000:00:00.0")
            .put("/sys/devices/pci0000:00/0000:00:00.0/device", "0x1234\n")
        ),
        "unknown",
        "no-p2p",
    ),
    "a listed host bridge": (
        lambda t: (
            t.cpu("GenuineIntel", 6)
            .link("/sys/bus/pci/devices/0000:00:00.0", "/sys/devices/pci0000:00/0000:00:00.0")
            .put("/sys/devices/pci0000:00/0000:00:00.0/device", "0x09a2\n")
        ),
        "fastpath",
        "",
    ),
    "WSL": (lambda t: t.folder("/dev/dxg"), "fallback", "no-p2p"),
    "no render node": (
        lambda t: t.node_state("/dev/dri/renderD128", errno.ENOENT),
        "impossible",
        "no-device",
    ),
    "a device cgroup": (lambda t: t.node_state("/dev/kfd", errno.EPERM), "impossible", "no-device"),
    "not in the group": (lambda t: t.node_state("/dev/kfd", errno.EACCES), "impossible", "no-device"),
    "hidden by a variable": (lambda t: t.env(ROCR_VISIBLE_DEVICES=""), "impossible", "no-device"),
}


@pytest.mark.parametrize("name", TRAPS)
def test_traps_change_the_verdict(name: str) -> None:
    build, expected, code = TRAPS[name]
    found = verdict(build(ready_amd()))
    assert found.verdict == expected
    assert (code in codes(found)) if code else not codes(found)
    if expected != "fastpath":
        assert found.cure is not None
        assert found.decided_by


def test_a_small_bar_is_no_peer() -> None:
    found = verdict(ready_amd(visible=GIB // 4))
    assert (found.verdict, codes(found)) == ("fallback", ["no-p2p"])
    assert "Resizable BAR" in str(found.cure)


def test_a_downtrained_link_is_a_finding_and_no_obstacle() -> None:
    found = verdict(ready_amd(width=("4", "16")))
    assert found.verdict == "fastpath"
    assert any("16 GT/s x4, below its 16 GT/s x16" in f.sentence and not f.decides for f in found.findings)


PORTS = (ROOT_PORT, "0000:02:00.0")
SWITCHED = {
    "disk": "0000:03:00.0",
    "gpu": "0000:c1:00.0",
    "disk's port": "0000:0a:01.0",
    "gpu's port": "0000:0a:00.0",
}
"""The functions between a disk and a GPU below one switch, without the switch's upstream port, PORTS[1]."""


def _switched(vendor: str = "GenuineIntel", family: int = 6) -> Tree:
    """A disk and a GPU below one switch, behind an IOMMU that translates, on a host bridge that is on no list."""
    tree = Tree().cpu(vendor, family).kernel("PCI_P2PDMA").amdgpu().hip_library()
    tree.amd_gpu(1, SWITCHED["gpu"], *PORTS, SWITCHED["gpu's port"], group=9, translated=True)
    tree.nvme("nvme0n1", SWITCHED["disk"], *PORTS, SWITCHED["disk's port"]).mount("/data", "xfs", "nvme0n1")
    tree.put("/sys/bus/pci/devices/0000:00:00.0/device", "0x1234\n")
    return tree.file("/data/m")


def _readable(tree: Tree, **controls: int | None) -> Tree:
    for bdf in (*SWITCHED.values(), PORTS[1]):
        tree.acs(bdf, controls.get("rest"))
    return tree


def test_below_one_switch_nothing_of_the_host_is_asked() -> None:
    hidden = verdict(_switched(), "/data/m")
    assert (hidden.verdict, codes(hidden)) == ("unknown", ["no-p2p", "iommu-translated"])
    assert "cannot be read" in str([f.sentence for f in hidden.decided_by]), "this user is root"
    for control in (None, 0):
        found = verdict(_readable(_switched(), rest=control), "/data/m")
        assert (found.verdict, codes(found)) == ("fastpath", [])
        assert not any(f.layer == "iommu" for f in found.findings), "a peer's address is not translated"


def test_who_is_not_root_learns_that_root_would_know_of_acs() -> None:
    tree = _switched()
    tree.uid = 1000
    (finding,) = (f for f in verdict(tree, "/data/m").decided_by if f.layer == "pci")
    assert finding.needs_root
    assert "readable by root alone" in finding.sentence


@pytest.mark.parametrize("where", [*SWITCHED.values(), PORTS[1]])
@pytest.mark.parametrize(
    ("control", "name"),
    [(0x04, "P2P Request Redirect"), (0x08, "P2P Completion Redirect"), (0x20, "P2P Egress Control")],
)
def test_acs_anywhere_between_the_peers_sends_them_up(where: str, control: int, name: str) -> None:
    """As pci_bridge_has_acs_redir of the kernel: in the peers, the ports between them, and the one above both."""
    found = verdict(_readable(_switched()).acs(where, control), "/data/m")
    assert (found.verdict, codes(found)) == ("unknown", ["no-p2p", "iommu-translated"])
    (finding,) = (f for f in found.decided_by if f.layer == "pci")
    assert f"ACS of {where} ({name}) sends peer requests to the root complex" in finding.sentence
    assert f"pci=disable_acs_redir={where} " in finding.sentence
    assert finding.read_from == f"/sys/bus/pci/devices/{where}/config"


def test_acs_bits_that_stop_no_peer_are_no_obstacle() -> None:
    others = 0x01 | 0x02 | 0x10 | 0x40
    assert verdict(_readable(_switched(), rest=others), "/data/m").verdict == "fastpath"


def test_acs_above_the_switch_is_not_on_the_way() -> None:
    tree = _readable(_switched()).acs(ROOT_PORT, 0x1F)
    assert verdict(tree, "/data/m").verdict == "fastpath"


def test_what_acs_sends_up_may_go_through_a_root_complex_that_passes_it_on_but_for_its_iommu() -> None:
    tree = _readable(_switched("AuthenticAMD", 0x19)).acs(SWITCHED["disk's port"], 0x1D)
    assert codes(verdict(tree, "/data/m")) == ["iommu-translated"]
    tree.put("/sys/kernel/iommu_groups/9/type", "identity\n")
    tree.link(f"{tree.pci_path(SWITCHED['disk'])}/iommu_group", "/sys/kernel/iommu_groups/9")
    found = verdict(tree, "/data/m")
    assert found.verdict == "fastpath"
    assert any("should ACS send requests up" in f.sentence for f in found.findings)


def test_CPX_partitions_share_an_address_and_are_devices_of_their_own() -> None:
    tree = ready_amd()
    for n in range(2, 9):
        tree.kfd_node(n, gpu_id=2000 + n, bdf="0000:c1:00.0", minor=130 + n, xcc=1)
        tree.node_state(f"/dev/dri/renderD{130 + n}")
    machine = Machine(tree, Settings())
    assert [g.name for g in machine.gpus] == [f"hip:{n}" for n in range(8)]
    assert {g.bdf for g in machine.gpus} == {"0000:c1:00.0"}
    assert verdict(tree, device="hip:7").verdict == "fastpath"
    tree.node_state("/dev/dri/renderD138", errno.EACCES)
    assert verdict(tree, device="hip:7").verdict == "impossible"
    assert verdict(tree, device="hip:6").verdict == "fastpath"


def test_partitions_that_are_functions_find_their_device() -> None:
    tree = ready_amd().kfd_node(2, gpu_id=7, bdf="0000:c1:00.1", minor=140).node_state("/dev/dri/renderD140")
    assert verdict(tree, device="hip:1").verdict == "fastpath"


def nvidia(**more: object) -> Tree:
    tree = (
        Tree().cpu().nvme("nvme0n1", "0000:03:00.0").mount("/data", "xfs", "nvme0n1").file("/data/model.bin")
    )
    return tree.nvidia_gpu("0000:c1:00.0", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("build", "expected", "code"),
    [
        (lambda: nvidia().nvidia_fs(), "fastpath", ""),
        (lambda: nvidia(p2pmem=1 << 37), "fastpath", ""),
        (lambda: nvidia(), "fallback", "no-nvidia-fs"),
        (lambda: nvidia(p2pmem=0), "fallback", "no-nvidia-fs"),
        (lambda: nvidia().node_state("/dev/nvidiactl", errno.ENOENT), "impossible", "no-device"),
    ],
    ids=["nvidia-fs", "p2pdma", "neither", "p2pmem of size 0", "no device node"],
)
def test_nvidia(build: Callable[[], Tree], expected: str, code: str) -> None:
    found = verdict(build(), device="cuda:0")
    assert found.verdict == expected
    assert codes(found) == ([code] if code else [])


def test_nvidia_on_a_loop_device_is_fallback_though_cufile_takes_the_file() -> None:
    tree = nvidia().nvidia_fs().loop("loop0", "/img").mount("/l", "xfs", "loop0").file("/l/m")
    assert codes(verdict(tree, "/l/m", "cuda:0")) == ["block-stack"]
    raid = nvidia().nvidia_fs().md("md0", "raid0", "nvme0n1").mount("/r", "xfs", "md0").file("/r/m")
    assert verdict(raid, "/r/m", "cuda:0").verdict == "unknown"


def test_C104_a_container_without_udev_is_told_the_flag() -> None:
    tree = nvidia().nvidia_fs().put("/.dockerenv", "")
    found = verdict(tree, device="cuda:0")
    assert found.verdict == "fastpath"
    assert any("-v /run/udev:/run/udev:ro" in f.sentence for f in found.findings)
    absent = verdict(tree.node_state("/dev/nvidiactl", errno.ENOENT), device="cuda:0")
    assert absent.cure is not None
    assert "--gpus all" in absent.cure.command


@pytest.mark.parametrize("inside", ["/.dockerenv", ""])
def test_amd_devices_that_are_missing_name_flag_or_group(inside: str) -> None:
    tree = ready_amd().node_state("/dev/kfd", errno.EACCES)
    if inside:
        tree.put(inside, "")
    found = verdict(tree)
    assert "render" in str(found.cure)
    assert ("docker run --device=/dev/kfd --device=/dev/dri --group-add render" in str(found.cure)) == bool(
        inside
    )


@pytest.mark.parametrize(
    ("change", "expected", "code"),
    [
        ({"kind": stat.S_IFDIR}, "impossible", "file-kind"),
        ({"kind": stat.S_IFIFO}, "impossible", "file-kind"),
        ({"kind": stat.S_IFCHR}, "impossible", "file-kind"),
        ({"direct": errno.EINVAL}, "fallback", "no-direct-descriptor"),
        ({"align": 0}, "fallback", "no-direct-io"),
        ({"nbytes": 0}, "fastpath", ""),
        ({"nbytes": 1}, "fastpath", ""),
        ({"nbytes": 5 * GIB + 3}, "fastpath", ""),
        ({"align": 4096}, "fastpath", ""),
        ({"align": None}, "fastpath", ""),
        ({"opens": errno.EIO}, "impossible", "no-file"),
    ],
)
def test_the_file_itself(change: dict[str, int], expected: str, code: str) -> None:
    found = verdict(ready_amd().file("/data/model.bin", **change))  # type: ignore[arg-type]
    assert found.verdict == expected
    assert (code in codes(found)) if code else not codes(found)


@pytest.mark.parametrize("device", ["cpu", "hip:0"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (stat.S_IFDIR, "folder"),
        (stat.S_IFIFO, "pipe"),
        (stat.S_IFCHR, "character device"),
        (stat.S_IFSOCK, "socket"),
    ],
)
def test_what_has_no_offsets_is_said_once_with_the_cure(kind: int, name: str, device: str) -> None:
    """Both backends refuse for the same reason; a reader of the verdict is told it once, and what to name instead."""
    found = verdict(ready_amd().file("/data/model.bin", kind=kind), device=device)
    said = [f.sentence for f in found.findings if f.answer == "no"]
    assert said == [f"a {name} has no offsets to read or write at"]
    assert [f.sentence for f in found.decided_by] == said
    assert str(found.cure) == "name a regular file, a folder that holds some, or a block device"


def test_a_block_device_itself_may_be_read() -> None:
    tree = ready_amd().file("/dev/nvme0n1", device="nvme0n1").mount("/dev", "devtmpfs", "udev")
    assert verdict(tree.file("/dev/nvme0n1", device="nvme0n1"), "/dev/nvme0n1").verdict == "fastpath"
    tree.md("md0", "raid5", "nvme0n1").file("/dev/md0", device="md0")
    assert codes(verdict(tree, "/dev/md0")) == ["block-stack"]


def test_a_missing_file_is_impossible_and_a_forbidden_one_unknown_with_the_command_for_root() -> None:
    assert codes(verdict(ready_amd(), "/data/nothing")) == ["no-file"]
    tree = ready_amd().file("/data/it's secret", opens=errno.EACCES)
    tree.uid = 1000
    found = verdict(tree, "/data/it's secret")
    assert found.verdict == "unknown"
    assert found.decided_by[0].needs_root
    assert found.cure is not None
    import shlex
    import sys

    words = shlex.split(found.cure.command)
    assert words == [
        "sudo",
        sys.executable,
        "-P",
        "-m",
        "nobounce",
        "check",
        "/data/it's secret",
        "--device",
        "hip:0",
    ]


def test_what_root_would_know_is_unknown_for_others() -> None:
    tree = ready_amd().amdgpu(symbol=None)
    tree.uid = 1000
    found = verdict(tree)
    assert (found.verdict, codes(found)) == ("unknown", ["missing-module"])
    assert found.cure is not None
    assert found.cure.command.startswith("sudo ")
    tree.uid = 0
    assert "--probe" in str(verdict(tree).cure)


def test_settings_decide_too() -> None:
    forced = verdict(ready_amd(), force_compat_mode=True)
    assert (forced.verdict, codes(forced)) == ("fallback", ["fastpath-disabled"])
    assert forced.cure is not None
    assert forced.cure.command == "unset HIPFILE_FORCE_COMPAT_MODE"
    strict = verdict(ready_amd().hip_library(ais=False), allow_compat_mode=False)
    assert strict.verdict == "impossible"
    assert strict.cure is not None
    assert strict.cure.command == "unset HIPFILE_ALLOW_COMPAT_MODE"
    odd = (
        ready_amd()
        .nvme("nvme5n1", "0000:05:00.0")
        .mount("/b", "btrfs", "nvme5n1", anonymous=True)
        .file("/b/m")
    )
    assert verdict(odd, "/b/m", unsupported_file_systems=True).verdict == "fastpath"


def test_two_obstacles_are_counted_and_the_cheaper_cure_comes_first() -> None:
    tree = ready_amd().loop("loop0", "/img").mount("/l", "xfs", "loop0").file("/l/m").hip_library(ais=False)
    found = verdict(tree, "/l/m")
    assert sorted(codes(found)) == ["block-stack", "no-amd-file-calls"]
    assert "another obstacle remains" in str(found.cure)


def test_the_nearest_volume_is_advised() -> None:
    far = ready_amd().pci("0000:81:00.0", "0000:80:01.0", root="pci0000:80")
    far.nvme("nvme9n1", "0000:81:00.0", "0000:80:01.0", root="pci0000:80").mount("/far", "xfs", "nvme9n1")
    far.loop("loop0", "/i").mount("/l", "xfs", "loop0").file("/l/m")
    assert str(verdict(far, "/l/m").cure).startswith("copy the file to /data:")
    assert Machine(far, Settings()).gpus[0].bdf == "0000:c1:00.0"


def test_every_file_of_a_folder_gets_its_verdict() -> None:
    tree = ready_amd().file("/data/b.bin").file("/data/.hidden").file("/data", kind=stat.S_IFDIR)
    found = check_paths(Machine(tree, Settings()), ["/data"], ["hip:0", "cpu"])
    assert [(v.path, v.device) for v in found] == [
        ("/data/b.bin", "hip:0"),
        ("/data/b.bin", "cpu"),
        ("/data/model.bin", "hip:0"),
        ("/data/model.bin", "cpu"),
    ]


def test_the_worst_verdict_gives_the_exit_code() -> None:
    made = {name: Verdict("f", "d", name) for name in EXIT_CODES}
    assert worst([made["fastpath"], made["fallback"]]) == 1
    assert worst([made["unknown"], made["fallback"]]) == 3
    assert worst([made["unknown"], made["impossible"], made["fastpath"]]) == 4
    assert worst([made["fastpath"]]) == 0


def test_the_runtimes_report_what_check_assumes() -> None:
    from nobounce.runtimes import registry

    for name, mine in (("cpu", CPU), ("sim", SIM)):
        direct = registry.get(name).direct_io()
        assert direct is not None
        assert direct.facts(0) == mine


BLOCKS = st.sampled_from(sorted(STACKS))
FILES = st.fixed_dictionaries(
    {
        "align": st.sampled_from([None, 0, 512, 4096]),
        "direct": st.sampled_from([0, errno.EINVAL]),
        "nbytes": st.sampled_from([0, 1, 4096, 4097, 3 * GIB]),
        "kind": st.sampled_from([stat.S_IFREG, stat.S_IFREG, stat.S_IFREG, stat.S_IFDIR, stat.S_IFIFO]),
        "direct_read": st.sampled_from(["yes", "no"]),
    }
)
SYSTEMS = st.sampled_from(
    [("xfs", None), ("ext4", "ordered"), ("ext4", "none"), ("btrfs", None), ("tmpfs", None)]
)
CHOICES = st.fixed_dictionaries(
    {
        "force_compat_mode": st.booleans(),
        "allow_compat_mode": st.booleans(),
        "unsupported_file_systems": st.booleans(),
    }
).filter(lambda c: not (c["force_compat_mode"] and not c["allow_compat_mode"]))


@given(
    stack=BLOCKS,
    file=FILES,
    system=SYSTEMS,
    settings=CHOICES,
    trap=st.sampled_from([None, *sorted(TRAPS)]),
    device=st.sampled_from(["hip:0", "cuda:0", "cpu", "sim:0"]),
)
def test_check_and_a_real_request_never_disagree(stack, file, system, settings, trap, device) -> None:  # type: ignore[no-untyped-def]
    """A real request of the same facts is judged here as io/ judges it: the runtime's DirectFacts and the file's facts."""
    build, block, _ = STACKS[stack]
    tree = ready_amd()
    build(tree)
    if trap is not None:
        TRAPS[trap][0](tree)
    if device == "cuda:0":
        tree.nvidia_gpu("0000:d1:00.0").nvidia_fs()
    fstype, data = system
    tree.mount("/s", fstype, "none" if fstype == "tmpfs" else block, data=data).file("/s/m", **file)
    machine = Machine(tree, Settings(**settings))
    (found,) = check_paths(machine, ["/s/m"], [device])
    view, seen = view_of(machine, device), look(machine, "/s/m")
    if view.absent:
        assert found.verdict == "impossible"
        return
    assert seen.facts is not None
    request = read_request(machine, seen.facts, view.best, device)
    try:
        route = judge(request)
    except RouteError as error:
        route, refused = None, {r.code for r in error.refusals}
    if route is None:
        assert found.verdict == "impossible"
        assert refused <= set(codes(found))
        return
    direct = route.nbytes("fallback") == 0
    # What lies between this disk and this GPU is no fact of a request: there the driver answers, and check says so before.
    between = [f for f in found.decided_by if f.layer in ("pci", "iommu", "block") and f.answer == "no"]
    if found.verdict == "fastpath":
        assert direct
    elif found.verdict == "fallback":
        assert not direct or between
        assert {r.code for r in hard_refusals(request)} <= set(codes(found))
    elif found.verdict == "impossible":
        assert between
        assert not settings["allow_compat_mode"]
    else:
        assert any(f.answer == "unknown" for f in found.decided_by)
        assert outcome(request) in ("fastpath", "fallback")
    if not direct:
        assert found.verdict != "fastpath"


@given(peer=st.sampled_from(["yes", "no", "unknown"]), rule=st.sampled_from(["probe", "hipfile"]))
def test_J29_the_judge_refuses_a_stack_only_where_the_rule_is_hipfiles(peer, rule) -> None:  # type: ignore[no-untyped-def]
    machine = Machine(ready_amd(), Settings())
    facts = look(machine, "/data/model.bin").facts
    assert facts is not None
    assert facts.block is not None
    changed = replace(facts, block=replace(facts.block, peer=peer, because="it is so"))
    refused = [
        r.code for r in hard_refusals(read_request(machine, changed, replace(HIP, file_rule=rule), "hip:0"))
    ]
    assert refused == (["block-stack"] if peer == "no" and rule == "hipfile" else [])


class _Hip:
    """What AmdFileDirect asks of a HIP runtime, with or without the calls."""

    def __init__(self, calls: bool) -> None:
        self.calls = calls

    def runtime_version(self) -> int:
        return 70200000

    def symbol(self, name: bytes, version: int, flags: int) -> tuple[int, int]:
        return (1 if self.calls else 0), 0

    def pci_bus_id(self, room: int, device: int) -> str:
        return "ffff:ff:1f.7"


class _CuFile:
    """The bindings of a cuFile that opens."""

    BoolConfigParameter = SimpleNamespace(PROPERTIES_ALLOW_COMPAT_MODE=1, USE_PCIP2PDMA=2)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: None


def test_the_gpu_runtimes_report_what_check_assumes(tmp_path: Path) -> None:
    with_calls = AmdFileDirect(_Hip(True)).facts(0)  # type: ignore[arg-type]
    assert replace(with_calls, virtual_function="unknown") == HIP
    without = AmdFileDirect(_Hip(False)).facts(0)  # type: ignore[arg-type]
    seen = view_of(Machine(ready_amd().hip_library(ais=False), Settings()), "hip:0").best
    assert (without.available, without.code) == (seen.available, seen.code) == (False, "no-amd-file-calls")
    info = DeviceInfo(name="NVIDIA H200", pci_bus_id="0000:c1:00.0")
    bare = CuFileDirect(lambda device: info, root=str(tmp_path), bindings=_CuFile).facts(0)
    seen = view_of(Machine(nvidia(), Settings()), "cuda:0").best
    assert (bare.available, bare.code, bare.because) == (seen.available, seen.code, seen.because)
    (tmp_path / "proc/driver/nvidia-fs").mkdir(parents=True)
    (tmp_path / "sys/module/nvidia_fs").mkdir(parents=True)
    loaded = CuFileDirect(lambda device: info, root=str(tmp_path), bindings=_CuFile).facts(0)
    assert replace(loaded, p2p="unknown") == CUDA_DIRECT


def notes(found: Verdict) -> str:
    return "\n".join(f"{f.layer}: {f.sentence}" for f in found.findings if not f.decides)


def test_what_a_bug_report_wants_to_know_is_noted_and_decides_nothing() -> None:
    tree = ready_amd().amdgpu(dkms="amdgpu/6.8.5-2041575.22.04, 6.8.0-45-generic, x86_64: installed")
    tree.put("/sys/module/amdgpu/version", "6.8.5\n").put("/sys/module/amdgpu/parameters/pcie_p2p", "N\n")
    tree.answer("kfd_version", value=[1, 18]).env(
        HSA_XNACK="1", HIP_LAUNCH_BLOCKING="1", HIP_VISIBLE_DEVICES="0"
    )
    tree.kfd_node(1, gpu_id=1001, minor=128, gfx=110000)
    found = verdict(tree)
    assert found.verdict == "fastpath"
    for said in (
        "KFD's interface is 1.18",
        "pcie_p2p off",
        "amdgpu 6.8.5, DKMS build 2041575",
        "HSA_XNACK=1 is set, but gfx1100 cannot",
        "HIP_LAUNCH_BLOCKING=1",
        "HIP_VISIBLE_DEVICES=0",
        "nvme: nvme0: Fast Disk 9000, 1.0, live, pcie, 0000:03:00.0",
    ):
        assert said in notes(found)


def test_another_numa_node_is_noted() -> None:
    assert "NUMA node 0 and hip:0 on 1" in notes(verdict(ready_amd(numa=1)))


def test_nvidia_settings_are_noted() -> None:
    tree = (
        nvidia()
        .nvidia_fs()
        .put("/proc/driver/nvidia/params", 'EnableMSI: 1\nRegistryDwords: "RMForceStaticBar1=1;"\n')
    )
    tree.put("/etc/cufile.json", '{"properties": {"allow_compat_mode": true, "use_pci_p2pdma": false}}')
    said = notes(verdict(tree, device="cuda:0"))
    for part in ("570.86.15", "RMForceStaticBar1=1;", "allow_compat_mode is true", "use_pci_p2pdma is false"):
        assert part in said
    broken = verdict(tree.put("/etc/cufile.json", "{"), device="cuda:0")
    assert broken.verdict == "fastpath"
    assert "is no JSON" in notes(broken)


def test_cudas_numbers_are_doubted_where_models_differ() -> None:
    tree = nvidia().nvidia_fs().nvidia_gpu("0000:41:00.0", model="NVIDIA T4")
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in notes(verdict(tree, device="cuda:0"))


@pytest.mark.parametrize(
    ("fstype", "options", "said"),
    [
        ("nfs4", "rw,proto=rdma", "over the network (rdma)"),
        ("nfs4", "rw", "nfs4 at /s over the network"),
        ("fuse.sshfs", "rw", "whose reads are served by a process"),
        ("xfs", "ro", "mounted read-only"),
    ],
)
def test_file_systems_say_what_lies_behind_them(fstype: str, options: str, said: str) -> None:
    tree = ready_amd().mount("/s", fstype, "server:/x", options).file("/s/m")
    assert said in notes(verdict(tree, "/s/m"))


def test_what_carries_a_network_file_system_is_not_known() -> None:
    """hipFile tries NFS over RDMA where the variable allows it (G-15); whether that is direct, nothing here tells."""
    tree = ready_amd().mount("/s", "nfs4", "server:/x", "rw,proto=rdma").file("/s/m")
    assert verdict(tree, "/s/m").verdict == "fallback"
    found = verdict(tree, "/s/m", unsupported_file_systems=True)
    assert found.verdict == "unknown"
    assert "--probe" in str(found.cure)
    remote = nvidia().nvidia_fs().mount("/s", "nfs4", "server:/x", "rw,proto=rdma").file("/s/m")
    assert verdict(remote, "/s/m", "cuda:0").verdict == "unknown"


def test_a_virtual_function_is_the_judges_own_condition() -> None:
    tree = ready_amd()
    tree.folder(f"{tree.pci_path('0000:c1:00.0')}/physfn")
    best = view_of(Machine(tree, Settings()), "hip:0").best
    assert (best.available, best.virtual_function) == (True, "yes")


def test_a_volume_where_o_direct_could_not_be_tried_is_unknown_and_never_advised() -> None:
    tree = ready_amd().nvme("nvme1n1", "0000:04:00.0").mount("/no", "xfs", "nvme1n1", o_direct=errno.EACCES)
    tree.nvme("nvme2n1", "0000:05:00.0").mount("/ro", "xfs", "nvme2n1", "ro")
    machine = Machine(tree, Settings())
    volumes, view = Volumes(machine), view_of(machine, "hip:0")
    rows = {v.mount_point: v for v in volumes.judged([view, view_of(machine, "cpu")])}
    assert rows["/no"].o_direct == "unknown"
    assert rows["/no"].verdicts == {"hip:0": "unknown", "cpu": "unknown"}
    assert rows["/data"].verdicts == {"hip:0": "fastpath", "cpu": "fastpath"}
    assert volumes.better(view) == ["/data"]


def test_a_container_that_shows_only_device_nodes_has_its_gpus() -> None:
    tree = (
        Tree().cpu().nvme("nvme0n1", "0000:03:00.0").mount("/data", "xfs", "nvme0n1").file("/data/model.bin")
    )
    tree.put("/dev/nvidia0", "").put("/dev/nvidia1", "").put("/dev/nvidia-uvm", "").node_state(
        "/dev/nvidiactl"
    )
    machine = Machine(tree, Settings())
    assert [(g.name, g.bdf) for g in machine.gpus] == [("cuda:0", ""), ("cuda:1", "")]
    assert codes(verdict(tree, device="cuda:1")) == ["no-nvidia-fs"]
    found = verdict(tree.nvidia_fs(), device="cuda:1")
    assert found.verdict == "unknown"
    assert "no-p2p" in codes(found)


def test_simulated_devices_are_as_many_as_the_variable_says() -> None:
    machine = Machine(ready_amd(), Settings(sim_devices=3))
    assert view_of(machine, "sim:2").absent == ""
    (found,) = check_paths(machine, ["/data/model.bin"], ["sim:3"])
    assert (found.verdict, codes(found)) == ("impossible", ["no-device"])
