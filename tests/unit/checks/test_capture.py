"""What a capture keeps and what it takes out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nobounce.checks.capture import Scrubber, scrubbed
from nobounce.checks.machine import Machine
from nobounce.checks.report import check_paths, libraries, survey, survey_data
from nobounce.checks.svg import draw
from nobounce.checks.topology import topology_of
from nobounce.config import Settings
from nobounce.facts.acs import acs_control
from nobounce.facts.source import SCHEMA, CapturedSource, RecordingSource, Source
from trees import Tree, ready_amd


@pytest.mark.parametrize(
    ("text", "kept", "gone"),
    [
        ("mac=52:54:00:ab:cd:ef quiet", "quiet", "52:54:00"),
        ("guid fe:80:00:00:00:00:00:01", "guid", "fe:80:00"),
        ("addr=10.20.30.40,port=4420", "port=4420", "10.20.30.40"),
        ("clientaddr=fe80::1234:5678", "clientaddr=", "fe80"),
        ("2001:db8:1:2:3:4:5:6 x", " x", "db8:1:2"),
        ("nas.example.com:/export rw", ":/export rw", "example"),
        ("nas:/export rw", ":/export rw", "nas"),
        ("/dev/mapper/myhost--vg-root ext4", "--vg-root ext4", "myhost"),
        ("host myhost.example.com up", "up", "myhost"),
        ("UUID=123E4567-E89B-12D3-A456-426614174000", "UUID=", "123E4567"),
        ("LVM-" + "aB3" * 21 + "x", "LVM-", "aB3"),
        ("nqn.2014-08.org.nvmexpress:uuid:abc next", " next", "nvmexpress"),
        ("GPU UUID: GPU-0a1b2c3d-4e5f", "GPU UUID: GPU-", "0a1b2c3d"),
        ("simd_count 8\nunique_id 81985529216486895\n", "simd_count 8\nunique_id ", "81985529216486895"),
    ],
)
def test_what_names_a_machine_goes_and_the_rest_stays(text: str, kept: str, gone: str) -> None:
    found = Scrubber(["myhost.example.com"]).text(text)
    assert kept in found
    assert gone not in found


@pytest.mark.parametrize(
    "text",
    [
        "/sys/devices/pci0000:00/0000:00:01.1/0000:03:00.0/nvme/nvme0",
        "0000:c1:00.0",
        "00000000:C1:00.0",
        "259:3",
        "data=ordered",
        "16.0 GT/s PCIe",
        "amdgpu/6.8.5-2041575.22.04, 6.8.0-45-generic, x86_64: installed",
        "/usr/lib:/opt/rocm/lib",
        "0::/user.slice",
        "570.86.15",
        "2.24.2",
        "0x0000000000000000 0x0000000000003fff",
    ],
)
def test_what_verdicts_need_stays(text: str) -> None:
    assert Scrubber(["data.box", "localhost"]).text(text) == text


def test_the_same_name_becomes_the_same_token() -> None:
    scrubber = Scrubber([])
    first, again, other = (scrubber.text(t) for t in ("10.0.0.1", "x 10.0.0.1", "10.0.0.2"))
    assert again == f"x {first}"
    assert other != first


def test_serial_numbers_and_remote_addresses_go_and_a_local_disks_address_stays() -> None:
    answers = {
        json.dumps(["read", "/sys/class/nvme/nvme0/serial"]): {"value": "S3CR3T\n"},
        json.dumps(["read", "/sys/class/nvme/nvme0/address"]): {"value": "0000:03:00.0\n"},
        json.dumps(["read", "/sys/class/nvme/nvme9/address"]): {"value": "traddr=10.1.2.3,host_traddr=nas\n"},
        json.dumps(["uname"]): {"value": ["Linux", "myhost", "6.8", "v", "x86_64"]},
        json.dumps(["exists", "/x"]): {"errno": 13},
    }
    found, _ = scrubbed(answers, ["myhost"])
    text = json.dumps(found)
    assert "0000:03:00.0" in text
    assert found['["exists", "/x"]'] == {"errno": 13}
    for secret in ("S3CR3T", "10.1.2.3", "nas", "myhost"):
        assert secret not in text


def test_a_pci_devices_serial_number_goes_and_its_acs_stays() -> None:
    tree = Tree().pci("0000:03:00.0").acs("0000:03:00.0", 0x1D)
    config = bytearray(tree.read_bytes("/sys/bus/pci/devices/0000:03:00.0/config"))
    config[0x200:0x20C] = b"\x03\0\x01\0" + b"\x11\x22\x33\xff\xfe\x44\x55\x66"
    config[0x148:0x14C] = (0x000D | 1 << 16 | 0x200 << 20).to_bytes(4, "little")
    key = json.dumps(["read", "/sys/bus/pci/devices/0000:03:00.0/config"])
    found, _ = scrubbed({key: {"value": config.decode("latin-1")}}, [])
    kept = found[key]["value"].encode("latin-1")
    assert kept[0x204:0x20C] == bytes(8)
    assert kept[:0x204] + kept[0x20C:] == config[:0x204] + config[0x20C:]
    assert acs_control(CapturedSource(found), "0000:03:00.0") == 0x1D


def test_questions_stay_findable() -> None:
    uuid = "123e4567-e89b-12d3-a456-426614174000"
    answers = {
        json.dumps(["listdir", "/sys/fs/btrfs"]): {"value": [uuid]},
        json.dumps(["listdir", f"/sys/fs/btrfs/{uuid}/devices"]): {"value": ["sda"]},
    }
    found, _ = scrubbed(answers, [])
    name = found[json.dumps(["listdir", "/sys/fs/btrfs"])]["value"][0]
    assert name != uuid
    assert json.dumps(["listdir", f"/sys/fs/btrfs/{name}/devices"]) in found


@given(st.text(max_size=200))
def test_any_text_is_survived(text: str) -> None:
    found = Scrubber(["myhost"]).text(f"{text.replace('myhost', '')} myhost ")
    assert "myhost" not in found


REAL = Path(__file__).parents[2] / "captures" / "h200.json"


def test_a_real_machine_with_a_gpu_is_judged_anywhere() -> None:
    """Answers of a virtual machine with an H200, as --capture saved them."""
    machine = Machine(CapturedSource.from_json(REAL.read_text()), Settings())
    gpu, cpu = check_paths(machine, ["/tmp/x"], ["cuda:0", "cpu"])
    assert (gpu.verdict, {f.code for f in gpu.decided_by}) == ("fallback", {"no-nvidia-fs", "block-stack"})
    assert "another obstacle remains" in str(gpu.cure)
    assert cpu.verdict == "fastpath"
    assert machine.gpus[0].model == "NVIDIA H200"
    assert any("580.159.04" in f.sentence for f in gpu.findings)


JUNK = st.sampled_from(
    [None, True, 0, -1, 10**30, 1.5, "", "junk", "\x00\xff", [], [1], ["x"], [[0, 0]], {}, {"version": []}]
)


def _answers() -> dict[str, dict[str, Any]]:
    tree = (
        ready_amd().lvm("dm-0", "nvme0n1").mount("/s", "ext4", "dm-0").file("/s/m").nvidia_gpu("0000:d1:00.0")
    )
    recording = RecordingSource(tree)
    _use(recording)
    return recording.answers


def _use(source: Source) -> None:
    machine = Machine(source, Settings())
    check_paths(machine, ["/s/m", "/none"], ["hip:0", "cuda:0", "cpu"])
    survey_data(survey(machine, []))
    libraries(machine)
    draw(topology_of(machine))


ANSWERS = _answers()


@given(changes=st.dictionaries(st.sampled_from(sorted(ANSWERS)), JUNK, min_size=1, max_size=4))
def test_a_capture_with_junk_in_it_is_refused_or_judged_and_never_raises_else(
    changes: dict[str, Any],
) -> None:
    answers = {**ANSWERS, **{key: {"value": value} for key, value in changes.items()}}
    try:
        source = CapturedSource.from_json(json.dumps({"schema": SCHEMA, "answers": answers}))
    except ValueError:
        return
    _use(source)


@given(gone=st.sets(st.sampled_from(sorted(ANSWERS)), max_size=40))
def test_a_capture_that_lacks_answers_is_judged(gone: set[str]) -> None:
    _use(CapturedSource({k: a for k, a in ANSWERS.items() if k not in gone}))


def test_a_capture_without_any_answer_is_judged() -> None:
    _use(CapturedSource({}))
