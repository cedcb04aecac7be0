"""Parsers of /sys and /proc: right answers on made trees, and none of them falls over a malformed one."""

from __future__ import annotations

import errno
import gzip
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capabilities import need
from nobounce.facts.access import cgroup_rules, container, groups, node_access, variables, wsl
from nobounce.facts.acs import acs_control, between
from nobounce.facts.block import block_by_name, block_facts, block_of, legs, peer, queue_limits, summary
from nobounce.facts.gpus import amd_gpus, nvidia_gpus, visible
from nobounce.facts.iommu import iommu_of, kernel_options
from nobounce.facts.kernel import ais_symbol, kernel_config, module_loaded, module_version, parse_dkms
from nobounce.facts.kfd import parse_properties, topology
from nobounce.facts.libraries import HIP, candidates, hip_library, ldconfig, parse_answer
from nobounce.facts.net import nics
from nobounce.facts.numa import numa_nodes
from nobounce.facts.nvidia import nvidia_driver, nvidia_storage, parse_cufile
from nobounce.facts.pci import (
    distance,
    parse_resources,
    parse_speed,
    pci_device,
    root_complex_allows,
)
from nobounce.facts.source import LiveSource, Source
from nobounce.facts.storage import nvmes
from nobounce.facts.sysfs import number, text
from nobounce.facts.virtual import parse_smi
from nobounce.runtimes.gpu.cufile import carriers
from trees import ROOT_PORT, Tree, ready_amd

GARBAGE = [
    "",
    "\n",
    "garbage",
    "-1",
    "99999999999999999999999999",
    "0x",
    "\x00\xff\xfe",
    "1 2 3\n" * 50,
    "a b\nc",
    ": , -",
]


def everything(source: Source) -> None:
    """Run every parser of a whole tree."""
    kfd = topology(source)
    amd = amd_gpus(source, kfd)
    driver = nvidia_driver(source)
    nvidia_storage(source, driver.gpus)
    nvidia_gpus(source, driver)
    for gpu in amd:
        _ = (gpu.node and gpu.node.gfx, gpu.node and gpu.node.render_node, gpu.node and gpu.node.ais)
    for bdf in ("0000:c1:00.0", "0000:03:00.0", "0000:d1:00.0"):
        device = pci_device(source, bdf)
        if device is not None:
            iommu_of(source, device)
            root_complex_allows(source, device, device)
            acs_control(source, bdf)
            between(device, device)
            distance(device, device)
    for name in ("nvme0n1", "dm-0", "md0", "loop0", "nvme9n1"):
        node = block_by_name(source, name)
        if node is not None:
            peer(node)
            queue_limits(source, node.disk)
            summary([node])
    numa_nodes(source)
    nics(source)
    nvmes(source)
    kernel_options(source)
    ais_symbol(source)
    container(source)
    cgroup_rules(source)
    module_version(source, "amdgpu")


def full() -> Tree:
    tree = ready_amd().lvm("dm-0", "nvme0n1").md("md0", "raid1", "nvme0n1").loop("loop0", "/i")
    tree.nvme_fabrics("nvme9n1").nvidia_gpu("0000:d1:00.0", p2pmem=4).nvidia_fs()
    tree.put("/sys/devices/system/node/node0/meminfo", "Node 0 MemTotal: 5 kB\n")
    tree.put("/sys/devices/system/node/node0/cpulist", "0\n").put(
        "/sys/devices/system/node/node0/distance", "10\n"
    )
    tree.put("/etc/cufile.json", '{"properties": {}}').put("/proc/cmdline", "iommu=pt quiet\n")
    tree.link("/sys/class/net/eth0/device", tree.pci_path("0000:c1:00.0")).put(
        "/sys/class/net/eth0/speed", "1\n"
    )
    tree.put("/sys/fs/cgroup/devices/devices.list", "a *:* rwm\n").put("/proc/1/cgroup", "0::/\n")
    return tree.put("/sys/module/amdgpu/version", "6.10\n")


FILES = sorted(p for p in full().text if not p.startswith("/opt"))


@pytest.mark.parametrize("garbage", GARBAGE)
def test_no_parser_falls_over_one_malformed_file(garbage: str) -> None:
    for path in FILES:
        everything(full().put(path, garbage))


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.EIO, errno.EINVAL, errno.ENODEV])
def test_no_parser_falls_over_a_file_that_cannot_be_read(code: int) -> None:
    for path in FILES:
        everything(full().fail(path, code))


def test_every_file_of_the_full_tree_is_read_by_some_parser() -> None:
    tree = full()
    everything(tree)
    read = {tree._real(key[0]) for question, key in tree.asked if question == "read"}
    never = {"/proc/self/mountinfo", "/proc/driver/nvidia-fs/devcount"}
    bridge = tree.pci_path(ROOT_PORT)
    left = {p for p in FILES if p not in read and p not in never and p.rpartition("/")[0] != bridge}
    assert {p.rpartition("/")[2] for p in left} <= {"address", "libcufile.so", "libcuda.so"}


@given(st.text(max_size=300))
def test_texts_of_every_kind(found: str) -> None:
    parse_properties(found)
    parse_resources(found)
    parse_speed(found)
    parse_dkms(found, "6.8")
    parse_cufile(found)


def test_small_files() -> None:
    tree = Tree().put("/sys/a", " 12 \n").put("/sys/b", "0x1f\n").put("/sys/c", "x\n")
    assert (text(tree, "/sys/a"), number(tree, "/sys/a"), number(tree, "/sys/b", 0)) == ("12", 12, 31)
    assert (number(tree, "/sys/c"), number(tree, "/sys/none"), text(tree, "/sys/none")) == (None, None, None)


# PCI


def test_a_pci_device() -> None:
    tree = Tree().pci("0000:03:00.0", ROOT_PORT, numa=1, group=14, speed=("8.0 GT/s PCIe", "16.0 GT/s PCIe"))
    entry = tree.pci_path("0000:03:00.0")
    tree.put(
        f"{entry}/resource", "0x0000000000000000 0x0000000000003fff 0x0000000000140204\n0x0 0x0 0x0\nbad\n"
    )
    tree.link(f"{entry}/driver", "/sys/bus/pci/drivers/nvme").folder("/sys/bus/pci/drivers/nvme")
    found = pci_device(tree, "0000:03:00.0")
    assert found is not None
    assert (found.vendor, found.pci_class, found.numa_node, found.iommu_group) == (0x144D, 0x010802, 1, 14)
    assert (found.parents, found.bars, found.driver) == (("pci0000:00", ROOT_PORT), (0x4000,), "nvme")
    assert found.link.downtrained
    assert iommu_of(tree, found).translated == "no"
    assert pci_device(tree, "0000:99:00.0") is None


@pytest.mark.parametrize(
    ("one", "other", "far"),
    [
        (
            (ROOT_PORT, "0000:02:00.0", "0000:03:00.0"),
            (ROOT_PORT, "0000:02:00.0", "0000:03:01.0"),
            "same-switch",
        ),
        ((ROOT_PORT,), (ROOT_PORT,), "same-root-port"),
        ((ROOT_PORT,), ("0000:00:02.1",), "same-host-bridge"),
    ],
)
def test_distances(one: tuple[str, ...], other: tuple[str, ...], far: str) -> None:
    tree = Tree().pci("0000:a0:00.0", *one).pci("0000:b0:00.0", *other)
    a, b = pci_device(tree, "0000:a0:00.0"), pci_device(tree, "0000:b0:00.0")
    assert a is not None
    assert b is not None
    assert distance(a, b) == distance(b, a) == far
    assert distance(a, a) == "same-device"
    tree.pci("0000:c0:00.0", "0000:80:01.0", root="pci0000:80")
    c = pci_device(tree, "0000:c0:00.0")
    assert c is not None
    assert distance(a, c) == "other-host-bridge"


@pytest.mark.parametrize(
    ("vendor", "family", "bridge", "same", "answer"),
    [
        ("AuthenticAMD", 0x17, None, False, "yes"),
        ("AuthenticAMD", 0x15, None, True, "unknown"),
        ("GenuineIntel", 6, 0x2030, False, "yes"),
        ("GenuineIntel", 6, 0x3C00, True, "yes"),
        ("GenuineIntel", 6, 0x3C00, False, "no"),
        ("GenuineIntel", 6, 0x7777, True, "unknown"),
    ],
)
def test_the_kernels_list_of_root_complexes(
    vendor: str, family: int, bridge: int | None, same: bool, answer: str
) -> None:
    roots = ("pci0000:00", "pci0000:00" if same else "pci0000:80")
    tree = Tree().cpu(vendor, family).pci("0000:a0:00.0", ROOT_PORT, root=roots[0])
    tree.pci("0000:b0:00.0", "0000:80:01.0", root=roots[1])
    if bridge is not None:
        for root in set(roots):
            at = root.removeprefix("pci") + ":00.0"
            tree.put(f"/sys/bus/pci/devices/{at}/device", f"{bridge:#06x}\n")
    a, b = pci_device(tree, "0000:a0:00.0"), pci_device(tree, "0000:b0:00.0")
    assert a is not None
    assert b is not None
    assert root_complex_allows(tree, a, b)[0] == answer


# KFD


def test_a_kfd_node_has_the_address_that_a_real_one_has() -> None:
    tree = (
        Tree()
        .kfd_node(4, gpu_id=1, gfx=90010)
        .put(
            "/sys/class/kfd/kfd/topology/nodes/4/properties",
            "simd_count 416\nlocation_id 25344\ndomain 0\ngfx_target_version 90010\ncapability 746037888\ndrm_render_minor 129\n",
        )
    )
    (node,) = topology(tree).gpus
    assert (node.bdf, node.gfx, node.ais, node.render_node) == (
        "0000:63:00.0",
        "gfx90a",
        False,
        "/dev/dri/renderD129",
    )


def test_hidden_nodes_are_counted_and_left_out() -> None:
    tree = Tree().kfd_node(0).kfd_node(1, gpu_id=5).kfd_node(2, gpu_id=6)
    tree.fail("/sys/class/kfd/kfd/topology/nodes/1/properties", errno.EPERM)
    found = topology(tree)
    assert (found.hidden, [n.number for n in found.gpus]) == (1, [2])


def test_a_topology_that_changes_is_read_again() -> None:
    class Changing(Tree):
        reads = 0

        def _ask(self, question: str, key: tuple[object, ...], live: Callable[[], object]) -> object:
            if question == "read" and str(key[0]).endswith("generation_id"):
                self.reads += 1
                return f"{min(self.reads, 4)}\n"
            return super()._ask(question, key, live)

    tree = Changing()
    tree.kfd_node(1, gpu_id=5)
    assert topology(tree).generation == 4


def test_unknown_link_types_do_not_fail() -> None:
    tree = Tree().kfd_node(1, gpu_id=5, links=((99, 0), (11, 2)))
    assert [x.kind for x in topology(tree).gpus[0].links] == ["type 99", "xGMI"]
    where = "/sys/class/kfd/kfd/topology/nodes/1/io_links/0/properties"
    tree.put(where, "type 2\nnode_to 0\nflags 16\n")
    assert not topology(tree).gpus[0].links[0].peer_dma


@pytest.mark.parametrize(
    ("wanted", "left"),
    [
        (None, "abc"),
        ("", ""),
        ("1", "b"),
        ("2,0", "ca"),
        ("0,9,1", "a"),
        ("GPU-b", "b"),
        ("GPU-", ""),
        ("-1", ""),
    ],
)
def test_visibility_variables(wanted: str | None, left: str) -> None:
    assert "".join(visible(list("abc"), wanted, ["GPU-a", "GPU-b", "GPU-c"])) == left


def test_HIPs_order_after_both_variables() -> None:
    tree = Tree()
    for n in range(1, 5):
        tree.amd_gpu(n, f"0000:c{n}:00.0", unique_id=0x10 + n)
    tree.env(ROCR_VISIBLE_DEVICES="3,GPU-12,0", HIP_VISIBLE_DEVICES="1,0")
    assert [(g.name, g.bdf) for g in amd_gpus(tree, topology(tree))] == [
        ("hip:0", "0000:c2:00.0"),
        ("hip:1", "0000:c4:00.0"),
    ]
    del tree.environ["HIP_VISIBLE_DEVICES"]
    tree.env(CUDA_VISIBLE_DEVICES="2")
    assert [g.bdf for g in amd_gpus(tree, topology(tree))] == ["0000:c1:00.0"]


# kernel


def test_a_packed_configuration_is_unpacked_and_a_broken_one_says_nothing(tmp_path: Path) -> None:
    class Here(LiveSource):
        def uname(self) -> tuple[str, str, str, str, str]:
            return "Linux", "h", "nowhere", "", ""

    source = Here()
    import nobounce.facts.kernel as kernel

    packed = tmp_path / "config.gz"
    packed.write_bytes(gzip.compress(b"CONFIG_X=y\nCONFIG_PCI_P2PDMA=y\n"))
    assert kernel._config_lines(source, str(packed), "PCI_P2PDMA") == ["CONFIG_PCI_P2PDMA=y"]
    packed.write_bytes(b"\x1f\x8bnonsense")
    assert kernel._config_lines(source, str(packed), "PCI_P2PDMA") == []
    assert kernel._config_lines(source, str(tmp_path / "none"), "PCI_P2PDMA") is None
    live = kernel_config(LiveSource(), "PCI_P2PDMA")
    if os.path.exists("/proc/config.gz"):
        assert live.answer in ("yes", "no")


def test_the_symbol_is_not_searched_for_without_the_driver() -> None:
    tree = Tree()
    assert ais_symbol(tree) == ("no", "/sys/module/amdgpu")
    assert not [q for q, _ in tree.asked if q.startswith("probe")]
    hidden = Tree().amdgpu().answer("kallsyms", "kfd_ais_rw_file", value=[False, False])
    assert ais_symbol(hidden)[0] == "no"
    hidden.uid = 1000
    assert ais_symbol(hidden)[0] == "unknown"
    assert module_loaded(hidden, "amdgpu")


# NVIDIA


def test_the_nvidia_driver_and_its_gpus() -> None:
    tree = Tree().nvidia_gpu("0000:d1:00.0").nvidia_gpu("0000:41:00.0")
    found = nvidia_driver(tree)
    assert (found.version, found.gpus, found.models[0]) == (
        "570.86.15",
        ("0000:41:00.0", "0000:d1:00.0"),
        "NVIDIA H200",
    )
    assert all(g.certain for g in nvidia_gpus(tree, found))
    mixed = tree.nvidia_gpu("0000:e1:00.0", model="NVIDIA T4")
    assert not any(g.certain for g in nvidia_gpus(mixed, nvidia_driver(mixed)))
    mixed.env(CUDA_DEVICE_ORDER="PCI_BUS_ID", CUDA_VISIBLE_DEVICES="2")
    assert [(g.bdf, g.certain) for g in nvidia_gpus(mixed, nvidia_driver(mixed))] == [("0000:e1:00.0", True)]


def test_nvidia_gpus_of_a_container_without_the_drivers_proc_files() -> None:
    tree = Tree().pci("0000:d1:00.0", ROOT_PORT, vendor=0x10DE, pci_class=0x030200)
    tree.pci("0000:d1:00.1", ROOT_PORT, vendor=0x10DE, pci_class=0x040300)
    assert nvidia_driver(tree).gpus == ("0000:d1:00.0",)


@pytest.mark.parametrize("module", [True, False])
@pytest.mark.parametrize("proc", [True, False])
@pytest.mark.parametrize("size", [None, "0", "137438953472", "x"])
def test_nvidias_carriers_are_those_that_the_runtime_finds(
    tmp_path: Path, module: bool, proc: bool, size: str | None
) -> None:
    tree, bdf = Tree().pci("0000:d1:00.0"), "0000:d1:00.0"
    if module:
        tree.put("/sys/module/nvidia_fs/version", "2.24\n")
        (tmp_path / "sys/module/nvidia_fs").mkdir(parents=True)
    if proc:
        tree.put("/proc/driver/nvidia-fs/stats", "")
        (tmp_path / "proc/driver/nvidia-fs").mkdir(parents=True)
    if size is not None:
        tree.put(f"{tree.pci_path(bdf)}/p2pmem/size", size)
        (tmp_path / f"sys/bus/pci/devices/{bdf}/p2pmem").mkdir(parents=True)
        (tmp_path / f"sys/bus/pci/devices/{bdf}/p2pmem/size").write_text(size)
    mine, theirs = nvidia_storage(tree, (bdf,)), carriers(bdf, str(tmp_path))
    assert (mine.nvidia_fs is not None, bdf in mine.p2pdma) == tuple(theirs)


def test_cufile_json_with_comments_and_commas() -> None:
    raw = '{\n // a comment "quoted"\n "properties": { "allow_compat_mode": true, // yes\n "url": "http://x", },\n}'
    assert parse_cufile(raw) == ({"allow_compat_mode": True, "url": "http://x"}, "")
    assert "no JSON" in parse_cufile("{")[1]
    assert "no properties" in parse_cufile("[]")[1]


# libraries, access


def test_hipfiles_order_of_folders_each_library_once() -> None:
    tree = (
        Tree()
        .put("/opt/rocm-7/lib/libamdhip64.so.7.2", "")
        .link("/opt/rocm-7/lib/libamdhip64.so", "libamdhip64.so.7.2")
    )
    tree.link("/opt/rocm", "/opt/rocm-7").put("/mine/libamdhip64.so.6", "").put(
        "/usr/lib/libamdhip64.so.5", ""
    )
    tree.answer("glob", "/opt/rocm*/lib*", "/opt/rocm*/core-*/lib*", value=["/opt/rocm-7/lib"])
    tree.answer("ldconfig", value=["/usr/lib/libamdhip64.so.5", "/usr/lib/libcuda.so.1"])
    tree.env(LD_LIBRARY_PATH="/mine::/none", ROCM_PATH="/opt/rocm")
    assert candidates(tree, HIP) == [
        "/mine/libamdhip64.so.6",
        "/opt/rocm-7/lib/libamdhip64.so.7.2",
        "/usr/lib/libamdhip64.so.5",
    ]


def test_libraries_in_wheels_are_found() -> None:
    tree = Tree().answer("sites", value=["/v/site-packages", "/v/site-packages"])
    tree.put("/v/site-packages/nvidia/cufile/lib/libcufile.so.0", "")
    tree.put("/v/site-packages/torch/lib/libamdhip64.so", "")
    assert candidates(tree, "libcufile") == ["/v/site-packages/nvidia/cufile/lib/libcufile.so.0"]
    assert candidates(tree, HIP) == ["/v/site-packages/torch/lib/libamdhip64.so"]


def test_a_library_that_is_none_is_tried_in_a_child_and_says_why(tmp_path: Path) -> None:
    path = tmp_path / "libamdhip64.so"
    path.write_text("no library, but hipAmdFileRead and hipAmdFileWrite occur in it" + " " * 4096)
    found = hip_library(LiveSource(), str(path))
    assert found.ais == "no"
    assert "invalid ELF header" in found.because, "it was loaded"
    path.write_text("hipAmdFileRead alone")
    assert hip_library(LiveSource(), str(path)).because == "it has no hipAmdFileWrite"
    path.write_text("")
    assert hip_library(LiveSource(), str(path)).ais == "no"
    assert all(isinstance(p, str) for p in ldconfig(LiveSource()))


@pytest.mark.parametrize(
    ("answer", "ais"),
    [
        ({"version": 7, "hipAmdFileRead": True, "hipAmdFileWrite": True}, "yes"),
        ({"version": 7, "hipAmdFileRead": True, "hipAmdFileWrite": False}, "no"),
        ({"version": 7}, "no"),
        ({"hipAmdFileRead": True, "hipAmdFileWrite": True}, "no"),
        ({"error": "no such symbol"}, "no"),
        (None, "unknown"),
        ("text", "unknown"),
    ],
)
def test_what_a_hip_library_answers(answer: object, ais: str) -> None:
    assert parse_answer("/x", answer).ais == ais


def test_device_nodes() -> None:
    tree = Tree().node_state("/dev/kfd").node_state("/dev/a", errno.EACCES).node_state("/dev/b", errno.EPERM)
    tree.node_state("/dev/c", errno.EIO)
    assert [node_access(tree, f"/dev/{n}").state for n in ("kfd", "a", "b", "c", "none")] == [
        "ok",
        "denied",
        "hidden",
        "error",
        "absent",
    ]
    assert node_access(LiveSource(), "/dev/null").state == "ok"
    assert node_access(LiveSource(), "/dev/no-such-node").state == "absent"
    assert groups(LiveSource())


@pytest.mark.parametrize(
    ("build", "kind"),
    [
        (lambda t: t.put("/.dockerenv", ""), "docker"),
        (lambda t: t.put("/run/.containerenv", ""), "podman"),
        (lambda t: t.env(KUBERNETES_SERVICE_HOST="x"), "kubernetes"),
        (lambda t: t.put("/proc/1/cgroup", "0::/kubepods/x\n"), "kubernetes"),
        (lambda t: t.put("/proc/1/cgroup", "0::/lxc/x\n"), "lxc"),
        (lambda t: t.env(container="systemd-nspawn"), "container"),
        (lambda t: t, ""),
    ],
)
def test_containers(build: Callable[[Tree], Tree], kind: str) -> None:
    assert container(build(Tree()))[0] == kind


def test_wsl_variables_and_rules() -> None:
    tree = Tree().env(HIP_VISIBLE_DEVICES="0")
    assert not wsl(tree)
    tree.name = ("Linux", "h", "5.15.0-microsoft-standard-WSL2", "", "")
    assert wsl(tree)
    assert variables(tree, ("HIP_VISIBLE_DEVICES", "OTHER")) == {"HIP_VISIBLE_DEVICES": "0"}
    assert cgroup_rules(tree) is None


# block


def test_stacks_are_walked_to_their_legs_and_circles_end() -> None:
    tree = (
        Tree()
        .nvme("nvme0n1", "0000:03:00.0")
        .nvme("nvme1n1", "0000:04:00.0")
        .lvm("dm-0", "nvme0n1", "nvme1n1")
    )
    node = block_by_name(tree, "dm-0")
    assert node is not None
    assert [leg.name for leg in legs(node)] == ["nvme0n1", "nvme1n1"]
    facts = summary([node])
    assert facts is not None
    assert facts.nvme == ("0000:03:00.0", "0000:04:00.0")
    tree.lvm("dm-1", "dm-0").link(
        "/sys/devices/virtual/block/dm-0/slaves/dm-1", "/sys/devices/virtual/block/dm-1"
    )
    again = block_by_name(tree, "dm-1")
    assert again is not None
    assert peer(again)[0] == "no"
    assert summary([]) is None
    assert block_of(tree, (1, 1)) is None


def test_an_old_kernel_without_a_transport_file_is_local_if_it_is_on_the_bus() -> None:
    tree = Tree().nvme("nvme0n1", "0000:03:00.0")
    tree.fail(f"{tree.pci_path('0000:03:00.0')}/nvme/nvme0/transport", errno.ENOENT)
    node = block_by_name(tree, "nvme0n1")
    assert node is not None
    assert peer(node)[0] == "yes"


def test_queue_limits_in_bytes() -> None:
    tree = Tree().nvme("nvme0n1", "0000:03:00.0")
    node = block_by_name(tree, "nvme0n1")
    assert node is not None
    limits = queue_limits(tree, node)
    assert (limits.logical_block_nbytes, limits.dma_alignment, limits.max_nbytes) == (512, 4, 1280 * 1024)


def test_this_machines_own_disk_has_a_stack(tmp_path: Path) -> None:
    from nobounce.facts.file import examine

    path = tmp_path / "x"
    path.write_bytes(b"x")
    with LiveSource().opened(str(path)) as fd:
        facts = examine(LiveSource(), fd, path=str(path))
    found = block_facts(LiveSource(), facts)
    if facts.device[0] != 0:
        assert found is not None
        assert found.decided_by.startswith("/sys/")


def test_smi_of_any_shape() -> None:
    assert parse_smi(None) is None
    assert parse_smi([{"bdf": None}, 3]) is not None


DOUBLE = """
#include <string.h>
int hipRuntimeGetVersion(int *v) { *v = 70253211; return 0; }
int hipGetProcAddress(const char *name, void **pointer, int version, unsigned long long flags, int *status) {
    int known = %s;
    *pointer = known ? (void *)hipRuntimeGetVersion : 0;
    *status = known ? 0 : 1;
    return known ? 0 : 500;
}
const char names[] = "hipAmdFileRead hipAmdFileWrite";
"""


@pytest.mark.parametrize(
    ("condition", "ais"),
    [
        ('!strcmp(name, "hipAmdFileRead") || !strcmp(name, "hipAmdFileWrite")', "yes"),
        ('!strcmp(name, "hipAmdFileRead")', "no"),
        ("*(volatile int *)0", "unknown"),
    ],
    ids=["both calls", "one call", "it crashes"],
)
def test_a_library_with_the_calls_is_asked_by_hipGetProcAddress(
    tmp_path: Path, condition: str, ais: str
) -> None:
    need("cc")
    source, path = tmp_path / "hip.c", tmp_path / "libamdhip64.so"
    source.write_text(DOUBLE % condition)
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", path, source], check=True, timeout=60)
    found = hip_library(LiveSource(), str(path))
    assert found.ais == ais, found
    assert found.version == (None if ais == "unknown" else 70253211)
