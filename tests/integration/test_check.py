"""Verdicts on real file systems, and the routing of real requests by the block stack."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import nobounce
from capabilities import as_nobody, need, open_up
from filesystems import Machine
from nobounce import config, hipfile
from nobounce.checks.files import look
from nobounce.checks.machine import Machine as Facts
from nobounce.checks.report import check_paths, survey
from nobounce.cli.main import app
from nobounce.config import Settings
from nobounce.errors import RouteError
from nobounce.facts.source import LiveSource, RecordingSource
from nobounce.route.types import DirectFacts, MemoryKind
from nobounce.runtimes.host import sim
from pace import assert_takes_under

MIB = 1 << 20
EXPECTED = {
    "ext4-ordered": ("fastpath", "ordered"),
    "ext4-journal": ("fallback", "journal"),
    "ext4-writeback": ("fastpath", "writeback"),
    "ext4-no-journal": ("fastpath", "none"),
    "ext4-tuned-writeback": ("fastpath", "writeback"),
    "xfs": ("fastpath", None),
    "btrfs": ("fastpath", None),
    "tmpfs": ("fallback", None),
    "loop-on-loop": ("fastpath", "ordered"),
    "bind": ("fastpath", "ordered"),
}


def made(folder: Path, name: str = "check.bin") -> Path:
    path = folder / name
    with path.open("wb") as f:
        f.write(os.urandom(MIB))
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


def check(path: Path, *arguments: str) -> tuple[int, dict[str, object]]:
    config.override(None)
    done = CliRunner().invoke(app, ["check", str(path), "--json", *arguments])
    return done.exit_code, json.loads(done.stdout)["verdicts"][0]


@pytest.mark.parametrize("name", EXPECTED)
def test_the_verdict_on_a_real_file_system_is_what_a_real_transfer_does(disks: Machine, name: str) -> None:
    path = made(disks.get(name))
    verdict, journal = EXPECTED[name]
    code, found = check(path, "--device", "cpu")
    assert found["verdict"] == verdict, found
    assert code == {"fastpath": 0, "fallback": 1}[verdict]
    with nobounce.open(path) as f, nobounce.Device("cpu").allocate(MIB) as buffer:
        receipt = f.read(buffer)
        assert f.facts().filesystem.journal == journal
    assert (receipt.to_dict()["fallback_bytes"] == 0) == (verdict == "fastpath")
    probed, tried = check(path, "--device", "cpu", "--probe")
    assert probed == code
    assert tried["probe"]["backend"] == verdict  # type: ignore[index]


def test_overlay_says_what_its_upper_layer_does(disks: Machine) -> None:
    path = made(disks.get("overlay"))
    code, found = check(path, "--device", "cpu")
    with nobounce.open(path) as f, nobounce.Device("cpu").allocate(MIB) as buffer:
        direct = f.read(buffer).to_dict()["fallback_bytes"] == 0
    assert (found["verdict"] == "fastpath") == direct
    assert code in (0, 1)


def test_the_journaling_mode_is_read_from_the_kernel_not_from_the_mount_options(disks: Machine) -> None:
    found = look(Facts(LiveSource(), Settings()), str(made(disks.get("ext4-tuned-writeback"))))
    system = next(f for f in found.findings if f.layer == "file system")
    assert "data=writeback" in system.sentence
    assert system.read_from.startswith("/proc/fs/ext4/loop")


def test_loop_on_loop_is_seen_down_to_its_file_and_refused_for_p2p(disks: Machine) -> None:
    facts = look(Facts(LiveSource(), Settings()), str(made(disks.get("loop-on-loop")))).facts
    assert facts is not None
    assert facts.block is not None
    assert (facts.block.backing, facts.block.peer) == ("loop", "no")
    assert "loop-on-loop.img" in facts.block.because
    assert facts.block.decided_by.startswith("/sys/devices/virtual/block/loop")


def test_a_btrfs_is_traced_to_its_device(disks: Machine) -> None:
    facts = look(Facts(LiveSource(), Settings()), str(made(disks.get("btrfs")))).facts
    assert facts is not None
    assert facts.device[0] == 0
    assert facts.block is not None
    assert facts.block.backing == "loop"


def test_a_read_only_mount_says_so_and_can_be_read(disks: Machine, tmp_path: Path) -> None:
    made(disks.get("ext4-ordered"))
    point = tmp_path / "ro"
    point.mkdir()
    disks.run("mount", "--bind", disks.get("ext4-ordered"), point)
    try:
        disks.run("mount", "-o", "remount,ro,bind", point)
        code, found = check(point / "check.bin", "--device", "cpu")
        assert code == 0
        assert any("read-only" in f["sentence"] for f in found["findings"])  # type: ignore[attr-defined]
        rows = {v.mount_point: v for v in survey(Facts(LiveSource(), Settings()), ["cpu"]).volumes}
        assert rows[str(point)].o_direct == "unknown", "nothing can be made there to try O_DIRECT"
    finally:
        disks.run("umount", point)


def test_the_table_of_volumes_on_real_mounts(disks: Machine) -> None:
    for name in ("ext4-ordered", "ext4-journal", "xfs", "btrfs", "tmpfs"):
        disks.get(name)
    rows = {Path(v.mount_point).name: v for v in survey(Facts(LiveSource(), Settings()), ["cpu"]).volumes}
    assert rows["ext4-ordered"].fstype == "ext4 (ordered)"
    assert rows["ext4-journal"].fstype == "ext4 (journal)"
    assert (rows["xfs"].backing, rows["xfs"].o_direct, rows["xfs"].hipfile) == ("loop", "yes", "no")
    assert rows["btrfs"].o_direct == "unknown"
    assert "tmpfs" not in rows
    assert rows["xfs"].verdicts == {"cpu": "fastpath"}
    assert list(disks.get("xfs").glob(".nobounce*")) == []


def test_a_capture_of_a_real_machine_is_judged_the_same(disks: Machine) -> None:
    paths = [str(made(disks.get(name))) for name in ("ext4-ordered", "xfs", "tmpfs")]
    recording = RecordingSource(LiveSource())
    live = check_paths(Facts(recording, Settings()), paths, ["cpu", "sim:0", "hip:0"])
    from nobounce.facts.source import CapturedSource

    again = check_paths(
        Facts(CapturedSource.from_json(recording.to_json()), Settings()), paths, ["cpu", "sim:0", "hip:0"]
    )
    assert again == live


def test_an_unprivileged_user_on_a_real_file_system(disks: Machine) -> None:
    need("unprivileged")
    path = made(disks.get("xfs"))
    open_up(path)
    code = (
        "import json, sys\nfrom typer.testing import CliRunner\nfrom nobounce.cli.main import app\n"
        "go = lambda: CliRunner().invoke(app, ['check', sys.argv[1], '-d', 'cpu', '--json'])\n"
        "go(); CliRunner().invoke(app, ['check']); drop(); done = go()\nprint(json.dumps([done.exit_code, done.stdout]))\n"
    )
    path.chmod(0o644)
    exit_code, out = json.loads(as_nobody(code, str(path)).stdout)
    assert exit_code == 0, out
    path.chmod(0o600)
    exit_code, out = json.loads(as_nobody(code, str(path)).stdout)
    assert exit_code == 3
    assert json.loads(out)["verdicts"][0]["cure"]["command"].startswith("sudo ")


def test_J29_a_real_request_to_a_p2p_device_is_refused_by_the_stack(
    disks: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sim:0 under hip's rules: the file lies on a loop device, and no direct call is made."""
    facts = DirectFacts("sim", True, file_rule="hipfile", memory_kinds=frozenset({MemoryKind.DEVICE}))
    monkeypatch.setattr(sim.SimDirect, "facts", lambda self, device: facts)
    path = made(disks.get("xfs"))
    with nobounce.open(path) as f, nobounce.Device("sim:0").allocate(MIB) as buffer:
        receipt = f.read(buffer)
        assert receipt.to_dict()["reasons"] == {"block-stack": MIB}
        with pytest.raises(RouteError) as info:
            f.read(buffer, require="fastpath")
        assert [r.code for r in info.value.refusals] == ["block-stack"]
        assert "loop" in info.value.refusals[0].sentence


@pytest.mark.parametrize("profile", ["", "hipfile-0.5"])
def test_J29_the_facade_refuses_the_stack_too_unless_the_profile_is_the_published_one(
    disks: Machine, monkeypatch: pytest.MonkeyPatch, profile: str
) -> None:
    facts = DirectFacts("sim", True, file_rule="hipfile", memory_kinds=frozenset({MemoryKind.DEVICE}))
    monkeypatch.setattr(sim.SimDirect, "facts", lambda self, device: facts)
    config.override(Settings(profile=profile) if profile else Settings())
    device = nobounce.Device("sim:0")
    fd = os.open(made(disks.get("xfs")), os.O_RDONLY)
    hipfile.use(device)
    try:
        with device.allocate(MIB) as buffer:
            _, handle = hipfile.handle_register(fd)
            _, scores = hipfile.score(handle, buffer, MIB, 0, 0)
            assert scores is not None
            assert [r.code for r in scores.fastpath.refusals] == ([] if profile else ["block-stack"])
            assert scores.fastpath.value == (100 if profile else -1)
            hipfile.handle_deregister(handle)
    finally:
        while hipfile.use_count():
            hipfile.driver_close()
        hipfile.use(None)
        os.close(fd)


def test_the_stack_is_not_looked_up_for_devices_that_do_no_p2p(disks: Machine) -> None:
    path = made(disks.get("xfs"))
    with nobounce.open(path) as f, nobounce.Device("cpu").allocate(MIB) as buffer:
        f.read(buffer)
        assert f.facts().block is None
        known = f.facts(block=True)
        assert known.block is not None
        assert dataclasses.replace(known, block=None) == dataclasses.replace(f.facts(), block=None)


@pytest.mark.serial
def test_a_live_check_takes_under_300_ms(disks: Machine) -> None:
    for name in EXPECTED:
        disks.get(name)

    def checking() -> float:
        begin = time.perf_counter()
        CliRunner().invoke(app, ["check", "-q"])
        return time.perf_counter() - begin

    assert_takes_under(0.3, checking, tries=10)
