"""Topology: trees, distances, links and the picture, on generated hosts."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from nobounce.checks.machine import Machine
from nobounce.checks.svg import clean, draw
from nobounce.checks.topology import Topology, as_tree, topology_data, topology_of
from nobounce.cli.topology import topology_text
from nobounce.config import Settings
from trees import GIB, ROOT_PORT, Tree

XGMI, PCIE, HT = 11, 2, 1


def single() -> Tree:
    """One GPU and one disk below a root complex."""
    return numa(Tree().amd_gpu(1, "0000:c1:00.0", ROOT_PORT).nvme("nvme0n1", "0000:03:00.0"), 1)


def eight(*, links: bool = True) -> Tree:
    """Eight GPUs on two NUMA nodes, each below a switch with a disk, all joined by xGMI."""
    tree = numa(Tree(), 2)
    for n in range(8):
        root, port = f"pci0000:{n * 16:02x}", f"0000:{n * 16:02x}:01.0"
        switch = (port, f"0000:{n * 16 + 1:02x}:00.0")
        peers = tuple((XGMI, m + 2) for m in range(8) if m != n) if links else ()
        tree.amd_gpu(
            n + 2,
            f"0000:{n * 16 + 5:02x}:00.0",
            *switch,
            f"0000:{n * 16 + 2:02x}:00.0",
            root=root,
            numa=n // 4,
            links=(*peers, (PCIE, n // 4)),
            minor=128 + n,
        )
        tree.nvme(
            f"nvme{n}n1",
            f"0000:{n * 16 + 6:02x}:00.0",
            *switch,
            f"0000:{n * 16 + 2:02x}:01.0",
            root=root,
            numa=n // 4,
        )
    return tree.kfd_node(0).kfd_node(1)


def partitioned() -> Tree:
    """One GPU in CPX mode: eight nodes with one address."""
    tree = single()
    for n in range(2, 9):
        tree.kfd_node(n, gpu_id=900 + n, bdf="0000:c1:00.0", minor=130 + n, xcc=1, vram=24 * GIB)
    return tree


def numa(tree: Tree, count: int) -> Tree:
    for n in range(count):
        where = f"/sys/devices/system/node/node{n}"
        tree.put(f"{where}/cpulist", f"{n * 64}-{n * 64 + 63}\n").put(f"{where}/distance", "10 32\n")
        tree.put(f"{where}/meminfo", f"Node {n} MemTotal:       16777216 kB\n")
    return tree.put("/sys/devices/system/node/online", "0\n")


def of(tree: Tree) -> Topology:
    return topology_of(Machine(tree, Settings()))


def test_a_single_gpu() -> None:
    found = of(single())
    assert [(d.name, d.kind) for d in found.devices] == [("hip:0", "gpu"), ("nvme0", "nvme")]
    assert [(w.storage, w.gpu, w.distance, w.same_numa_node) for w in found.ways] == [
        ("nvme0", "hip:0", "same-root-port", True)
    ]
    assert found.links == ()
    assert "192.0 GiB" in topology_text(found)


def test_eight_gpus_with_xgmi() -> None:
    found = of(eight())
    assert len(found.ways) == 64
    near = [w for w in found.ways if w.distance == "same-switch"]
    assert [(w.storage, w.gpu) for w in near] == [(f"nvme{n}", f"hip:{n}") for n in range(8)]
    assert {w.distance for w in found.ways} == {"same-switch", "other-host-bridge"}
    assert sum(w.same_numa_node is False for w in found.ways) == 32
    assert len(found.links) == 28
    assert {x.kind for x in found.links} == {"xGMI"}
    assert found.links[0].max_bandwidth == 64000
    assert of(eight(links=False)).links == ()


def test_partitions_share_a_place() -> None:
    found = of(partitioned())
    gpus = [d for d in found.devices if d.kind == "gpu"]
    assert [g.name for g in gpus] == [f"hip:{n}" for n in range(8)]
    assert {g.bdf for g in gpus} == {"0000:c1:00.0"}


def test_a_tree_holds_every_device_once_and_passes_bridges_over() -> None:
    found = of(eight())
    names: list[str] = []

    def walk(branches: object) -> None:
        for branch in branches:  # type: ignore[attr-defined]
            if branch.device is not None:
                names.append(branch.device.name)
            walk(branch.below)

    walk(as_tree(found))
    assert sorted(names) == sorted(d.name for d in found.devices)
    assert [b.title for b in as_tree(found)] == ["NUMA node 0", "NUMA node 1"]
    (switch,) = as_tree(found)[0].below[0].below
    assert [b.device is not None for b in switch.below] == [True, True]


def test_clocks_memory_links_and_functions_as_sysfs_has_them() -> None:
    tree = single()
    entry = tree.pci_path("0000:c1:00.0")
    tree.put(f"{entry}/mem_info_vram_total", f"{192 * GIB}\n").put(
        f"{entry}/mem_info_vis_vram_total", f"{GIB}\n"
    )
    tree.put(f"{entry}/mem_info_vram_used", f"{GIB // 2}\n").folder(f"{entry}/physfn")
    tree.put(f"{entry}/pp_dpm_sclk", "0: 132Mhz\n1: 2100Mhz *\n").put(f"{entry}/current_link_width", "8\n")
    details = of(tree).devices[0].details()
    for word in (
        "192.0 GiB",
        "used 0.5 GiB",
        "reachable over PCI 1.0 GiB",
        "2100 MHz",
        "x8 (of 16 GT/s x16)",
        "virtual function yes",
    ):
        assert word in details


def test_nics_remote_disks_and_nvidia() -> None:
    tree = single().nvme_fabrics("nvme9n1", "rdma")
    tree.pci("0000:a1:00.0", ROOT_PORT, vendor=0x15B3, pci_class=0x020700)
    nic = tree.pci_path("0000:a1:00.0")
    tree.link("/sys/class/net/ib0/device", nic).put("/sys/class/net/ib0/speed", "400000\n")
    tree.put("/sys/class/net/ib0/operstate", "up\n").folder("/sys/class/net/lo")
    tree.link("/sys/class/infiniband/mlx5_0/device", nic).nvidia_gpu("0000:d1:00.0")
    found = {d.name: d for d in of(tree).devices}
    assert set(found) == {"hip:0", "cuda:0", "nvme0", "nvme9", "ib0"}
    assert found["ib0"].facts == {"speed": "400 Gbit/s", "state": "up", "RDMA": "mlx5_0"}
    assert found["nvme9"].root == ""
    assert "not on a bus of this machine" in topology_text(of(tree))
    assert next(w for w in of(tree).ways if w.storage == "nvme9").distance == "unknown"


def test_an_empty_machine_says_so() -> None:
    assert "no GPU, NVMe disk or network card found" in topology_text(of(Tree()))
    assert "no GPU" in draw(of(Tree()))


def test_json_has_everything() -> None:
    data = topology_data(of(eight()))
    assert len(data["devices"]) == 16
    assert data["devices"][0]["link"]["width"] == 16
    assert data["ways"][0]["text"] == "below one PCIe switch"
    assert data["numa_nodes"][1]["cpus"] == "64-127"


@pytest.mark.parametrize("tree", [single, eight, partitioned], ids=lambda t: t.__name__)
def test_the_picture_is_well_formed_names_every_device_and_knows_light_and_dark(tree) -> None:  # type: ignore[no-untyped-def]
    found = of(tree())
    picture = draw(found)
    root = ET.fromstring(picture)
    assert root.tag.endswith("svg")
    said = " ".join(t.text or "" for t in root.iter() if t.tag.endswith("text"))
    for device in found.devices:
        assert device.name in said
    assert "prefers-color-scheme: dark" in picture
    width, height = (float(root.attrib[k]) for k in ("width", "height"))
    for box in root.iter():
        if box.tag.endswith("rect"):
            assert float(box.attrib["x"]) + float(box.attrib["width"]) <= width
            assert float(box.attrib["y"]) + float(box.attrib["height"]) <= height


def test_names_from_the_machine_are_escaped_in_picture_and_terminal() -> None:
    tree = single()
    evil = '<script>alert("x")</script>&\x1b[2J\x00'
    tree.put(f"{tree.pci_path('0000:03:00.0')}/nvme/nvme0/model", evil + "\n")
    picture = draw(of(tree))
    assert "<script>" not in picture
    ET.fromstring(picture)
    assert "\x1b" not in topology_text(of(tree))
    assert "[2J" in topology_text(of(tree))
    assert clean('<&"') == "&lt;&amp;&quot;"
    tree.put(f"{tree.pci_path('0000:03:00.0')}/nvme/nvme0/model", "[red]bold[/red]\n")
    assert "[red]bold[/red]" in topology_text(of(tree))
