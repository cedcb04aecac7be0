"""nobounce check and topology as a person and a script see them."""

from __future__ import annotations

import errno
import io
import json
import os
import shlex
import stat
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from capabilities import as_nobody, need, open_up
from nobounce import config
from nobounce.checks import cures
from nobounce.cli import check, topology
from nobounce.cli.main import app
from nobounce.runtimes import faults
from pace import assert_takes_under
from trees import Tree, ready_amd

GOLDEN = Path(__file__).parent / "golden"
Run = Callable[..., Result]


def nobounce(*arguments: str | Path, env: dict[str, str] | None = None) -> Result:
    config.override(None)
    return CliRunner().invoke(app, [str(a) for a in arguments], env=env)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command on a tree instead of this machine."""

    def run(tree: Tree, *arguments: str | Path, **more: Any) -> Result:
        for module in (check, topology):
            monkeypatch.setattr(module, "LiveSource", lambda: tree)
        return nobounce(*arguments, **more)

    return run


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.bin"
    path.write_bytes(os.urandom(1 << 20))
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    return path


def _encrypted() -> Tree:
    tree = (
        ready_amd().nvme("nvme1n1", "0000:04:00.0").mapped("dm-0", "CRYPT-LUKS2-x", "nvme1n1", label="secret")
    )
    return tree.mount("/home", "ext4", "dm-0").file("/home/model.bin")


def _closed() -> Tree:
    return ready_amd().node_state("/dev/kfd", errno.EACCES)


def _hidden() -> Tree:
    tree = ready_amd().amdgpu(symbol=None)
    tree.uid = 1000
    return tree


SITUATIONS: dict[str, tuple[Callable[[], Tree], list[str], int]] = {
    "fastpath": (ready_amd, ["/data/model.bin"], 0),
    "fallback": (_encrypted, ["/home/model.bin"], 1),
    "unknown": (_hidden, ["/data/model.bin"], 3),
    "impossible": (_closed, ["/data/model.bin"], 4),
    "fastpath-cpu": (_encrypted, ["/home/model.bin", "--device", "cpu"], 0),
    "survey": (lambda: _encrypted().nvme_fabrics("nvme9n1").mount("/remote", "xfs", "nvme9n1"), ["-v"], 0),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_golden_output(name: str, on: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """NOBOUNCE_GOLDEN=write writes them anew."""
    monkeypatch.setattr(cures.sys, "executable", "/venv/bin/python")
    build, arguments, code = SITUATIONS[name]
    done = on(build(), "check", *arguments)
    assert done.exit_code == code, done.output
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("NOBOUNCE_GOLDEN") == "write":
        path.write_text(done.stdout)
    assert done.stdout == path.read_text()


@pytest.mark.parametrize("name", SITUATIONS)
def test_json_says_what_the_text_says(name: str, on: Run) -> None:
    build, arguments, code = SITUATIONS[name]
    done = on(build(), "check", *arguments, "--json")
    assert done.exit_code == code
    found = json.loads(done.stdout)
    assert (found["schema"], found["exit_code"]) == ("nobounce.check/1", code)
    if name == "survey":
        assert {"components", "volumes", "devices", "libraries", "system", "warnings"} <= found.keys()
        assert found["volumes"][0]["verdicts"] == {"hip:0": "fastpath", "cpu": "fastpath"}
    else:
        (verdict,) = found["verdicts"]
        assert verdict["verdict"] == name.partition("-")[0]
        assert all(f["read_from"] for f in verdict["findings"])
        assert bool(verdict["cure"]) == (not name.startswith("fastpath"))


@pytest.mark.parametrize("name", SITUATIONS)
def test_quiet_prints_nothing_and_keeps_the_exit_code(name: str, on: Run) -> None:
    build, arguments, code = SITUATIONS[name]
    for more in ([], ["--json"]):
        done = on(build(), "check", *[a for a in arguments if a != "-v"], "-q", *more)
        assert (done.stdout, done.exit_code) == ("", code)


@pytest.mark.parametrize(
    "arguments",
    [
        ["-q", "-v"],
        ["--device", "gpu:0"],
        ["--device", "cpu:x"],
        ["--probe"],
        ["--capture", "/tmp/a", "--replay", "/tmp/b"],
        ["--no-such-option"],
    ],
)
def test_usage_is_2(arguments: list[str], data: Path) -> None:
    done = nobounce("check", *arguments, *([data] if "--device" in arguments else []))
    assert done.exit_code == 2
    assert "Traceback" not in done.output


def test_settings_that_contradict_each_other_are_usage(data: Path) -> None:
    env = {"HIPFILE_ALLOW_COMPAT_MODE": "false", "HIPFILE_FORCE_COMPAT_MODE": "true"}
    done = nobounce("check", data, "--device", "cpu", env=env)
    assert done.exit_code == 2
    assert "HIPFILE_ALLOW_COMPAT_MODE" in done.output


def test_the_worst_of_several_files_and_devices_is_the_exit_code(on: Run) -> None:
    done = on(_encrypted(), "check", "/data/model.bin", "/home/model.bin", "-d", "hip:0", "-d", "cpu")
    assert done.exit_code == 1
    assert done.stdout.count(" on hip:0: ") == done.stdout.count(" on cpu: ") == 2
    assert on(_encrypted(), "check", "/data/model.bin", "/data/none", "-d", "hip:0").exit_code == 4


def test_the_device_is_the_one_that_the_variable_names(on: Run) -> None:
    env = {"NOBOUNCE_DEVICE": "sim:0"}
    assert " on sim:0: fastpath" in on(ready_amd(), "check", "/data/model.bin", env=env).stdout
    assert " on hip:0: fastpath" in on(ready_amd(), "check", "/data/model.bin").stdout
    assert on(ready_amd(), "check", "/data/model.bin", env={"NOBOUNCE_DEVICE": "gpu"}).exit_code == 2


def test_names_are_escaped(on: Run) -> None:
    tree = ready_amd().file("/data/\x1b[2Jx\udcff")
    done = on(tree, "check", "/data/\x1b[2Jx\udcff")
    assert done.exit_code == 0
    assert "\x1b" not in done.stdout


# this machine


def test_this_machine_live(data: Path) -> None:
    need("o_direct")
    done = nobounce("check", data, "--device", "cpu", "--json")
    assert done.exit_code == 0, done.output
    (verdict,) = json.loads(done.stdout)["verdicts"]
    assert (verdict["verdict"], verdict["direct_to"]) == ("fastpath", "host")
    for arguments in (["check"], ["check", "--json"], ["topology"], ["topology", "--json"]):
        done = nobounce(*arguments)
        assert done.exit_code in (0, 1, 3)
        assert "Traceback" not in done.output


def test_a_check_writes_nothing_beside_the_file(data: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in data.parent.iterdir()}
    nobounce("check", data, "--device", "cpu")
    nobounce("check")
    assert {p: p.stat().st_mtime_ns for p in data.parent.iterdir()} == before


def test_a_pipe_a_folder_and_a_missing_file_are_impossible(tmp_path: Path, data: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").mkdir()
    for name in ("pipe", "empty", "nothing"):
        assert nobounce("check", tmp_path / name, "--device", "cpu").exit_code == 4
    folder = nobounce("check", tmp_path, "--device", "cpu", "--json")
    assert [v["path"] for v in json.loads(folder.stdout)["verdicts"]] == [str(data)]
    assert nobounce("check", "/dev/null", "--device", "cpu").exit_code == 4


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_probe_moves_bytes_and_reports_the_receipt(data: Path, device: str) -> None:
    need("o_direct")
    done = nobounce("check", data, "--device", device, "--probe", "--json")
    assert done.exit_code == 0, done.output
    probe = json.loads(done.stdout)["verdicts"][0]["probe"]
    assert probe["receipt"]["fastpath_bytes"] == 1 << 20
    assert probe["backend"] == "fastpath"
    assert "probe: 1048576 bytes went direct" in nobounce("check", data, "-d", device, "--probe").stdout


def test_a_probe_that_bounces_overrules_the_check_and_says_so(data: Path) -> None:
    with faults.inject(op="direct", device="sim:0", because="no P2P on this machine"):
        done = nobounce("check", data, "--device", "sim:0", "--probe")
    assert done.exit_code == 1, done.output
    assert "says fastpath, the transfer says fallback" in done.stdout


def test_a_probe_of_a_device_that_is_not_there_is_reported(data: Path) -> None:
    done = nobounce("check", data, "--device", "hip:7", "--probe")
    assert done.exit_code in (3, 4)
    assert "probe: not possible: " in done.stdout


def test_python_m_nobounce_works(data: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nobounce", "check", str(data), "--device", "cpu", "-q"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "")


NOBODY = """
import json, sys, typer.testing, nobounce.cli.main
def check(*arguments):
    done = typer.testing.CliRunner().invoke(nobounce.cli.main.app, ["check", *arguments])
    return [done.exit_code, done.stdout, done.stderr, repr(done.exception)]
check(*sys.argv[1:]); check()
drop()
print(json.dumps(check(*sys.argv[1:])))
"""


def test_an_unprivileged_user_gets_answers_and_the_command_for_root(data: Path) -> None:
    open_up(data)
    data.chmod(0o600)
    done = as_nobody(NOBODY, str(data), "--device", "cpu")
    assert done.returncode == 0, done.stderr
    code, out, _, raised = json.loads(done.stdout)
    assert code == 3, (out, raised)
    command = next(line for line in out.splitlines() if line.strip().startswith("sudo "))
    words = shlex.split(command)
    assert words[0] == "sudo"
    assert words[2:] == ["-P", "-m", "nobounce", "check", str(data), "--device", "cpu"]
    as_root = subprocess.run(words[1:], capture_output=True, check=False, timeout=60)
    assert as_root.returncode == 0
    data.chmod(0o644)
    code, out, _, raised = json.loads(as_nobody(NOBODY, str(data), "--device", "cpu").stdout)
    assert code == 0, (out, raised)
    code, out, err, raised = json.loads(as_nobody(NOBODY).stdout)
    assert code in (1, 3), (out, err, raised)
    assert "AIS support in:" in out


# captures


def test_a_capture_is_judged_the_same_elsewhere(on: Run, tmp_path: Path) -> None:
    for name, (build, arguments, code) in SITUATIONS.items():
        path = tmp_path / f"{name}.tar"
        live = on(build(), "check", *arguments, "--capture", path)
        again = on(Tree(), "check", *[a for a in arguments if a == "-v"], "--replay", path)
        assert live.exit_code == again.exit_code == code
        assert again.stdout.replace("Linux host", "Linux testhost") == live.stdout


def test_a_capture_keeps_the_settings_that_verdicts_depend_on(on: Run, tmp_path: Path) -> None:
    path = tmp_path / "c.tar"
    env = {"HIPFILE_FORCE_COMPAT_MODE": "1", "NOBOUNCE_DEVICE": "sim:0"}
    live = on(ready_amd(), "check", "/data/model.bin", "--capture", path, env=env)
    assert live.exit_code == 1
    again = on(Tree(), "check", "--replay", path, env={"NOBOUNCE_DEVICE": "cpu"})
    assert again.stdout == live.stdout
    assert "fastpath-disabled" in again.stdout


def _secretive() -> Tree:
    tree = ready_amd().nvme_fabrics("nvme9n1").mount("/remote", "xfs", "nvme9n1").file("/remote/m")
    tree.mount(
        "/nfs",
        "nfs4",
        "fileserver.example.com:/export",
        "rw,proto=tcp,addr=10.20.30.40,clientaddr=fe80::1234:5678",
    )
    tree.mount("/uuid", "xfs", "/dev/disk/by-uuid/123e4567-e89b-12d3-a456-426614174000")
    tree.put(
        "/proc/cmdline",
        "root=UUID=123e4567-e89b-12d3-a456-426614174000 ip=192.168.7.7 host=testhost mac=52:54:00:ab:cd:ef\n",
    )
    tree.file("/data/testhost/x").file("/data/model.bin")
    tree.nvidia_gpu("0000:d1:00.0")
    return tree


SECRETS = [
    "testhost",
    "fileserver",
    "10.20.30.40",
    "fe80::1234:5678",
    "10.1.2.3",
    "10.1.2.9",
    "192.168.7.7",
    "123e4567-e89b-12d3-a456-426614174000",
    "52:54:00:ab:cd:ef",
    "a" * 64,
    "4660",
    "GPU-000000d1",
]


def test_a_capture_holds_no_host_name_address_serial_or_identity(on: Run, tmp_path: Path) -> None:
    path = tmp_path / "c.tar"
    tree = _secretive().lvm("dm-7", "nvme0n1").mount("/lv", "xfs", "dm-7")
    assert on(tree, "check", "/data/testhost/x", "/remote/m", "--capture", path).exit_code in (0, 1)
    held = ""
    with tarfile.open(path) as tar:
        assert tar.getnames() == ["capture.json", "request.json"]
        for member in tar:
            extracted = tar.extractfile(member)
            assert extracted is not None
            held += extracted.read().decode()
    assert [s for s in SECRETS if s in held] == []
    assert "0000:03:00.0" in held, "PCI addresses are no identity, and the verdict needs them"
    again = on(Tree(), "check", "--replay", path, "--json")
    verdicts = json.loads(again.stdout)["verdicts"]
    assert [v["path"] for v in verdicts[::2]] == ["/data/host/x", "/remote/m"]
    whole = tmp_path / "w.tar"
    first = on(tree, "check", "--capture", whole)
    second = on(Tree(), "check", "--replay", whole)
    assert second.exit_code == first.exit_code
    with tarfile.open(whole) as tar:
        extracted = tar.extractfile("capture.json")
        assert extracted is not None
        text = extracted.read().decode()
    assert [s for s in SECRETS if s in text] == []


@pytest.mark.parametrize("name", ["node0", "nvme0", "pci", "data", "class"])
def test_a_host_name_that_is_a_word_of_sysfs_breaks_no_capture(name: str, on: Run, tmp_path: Path) -> None:
    tree = _encrypted()
    tree.name = ("Linux", name, *tree.name[2:])
    live = on(tree, "check", "/home/model.bin", "--capture", tmp_path / "c.tar", "--json")
    again = on(Tree(), "check", "--replay", tmp_path / "c.tar", "--json")
    mine, theirs = (json.loads(x.stdout)["verdicts"][0] for x in (live, again))
    assert (mine["verdict"], [f["code"] for f in mine["decided_by"]]) == (
        theirs["verdict"],
        [f["code"] for f in theirs["decided_by"]],
    )


def _tar(path: Path, **parts: str) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in parts.items():
            info = tarfile.TarInfo(name.replace("_", "."))
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content.encode()))
    return path


def test_what_is_no_capture_is_refused_by_name(tmp_path: Path) -> None:
    good = '{"schema": "nobounce.check-request/1"}'
    bad = {
        "text": tmp_path / "text",
        "empty": _tar(tmp_path / "empty"),
        "half": _tar(tmp_path / "half", capture_json="{}"),
        "nonsense": _tar(tmp_path / "nonsense", capture_json="{", request_json=good),
        "other schema": _tar(
            tmp_path / "schema", capture_json='{"schema": "x", "answers": {}}', request_json=good
        ),
        "no request": _tar(tmp_path / "request", capture_json="{}", request_json="[]"),
    }
    bad["text"].write_text("not a tar")
    for what, path in bad.items():
        done = nobounce("check", "--replay", path)
        assert done.exit_code == 2, what
        assert str(path) in done.output
        assert "Traceback" not in done.output
    link = tmp_path / "link.tar"
    with tarfile.open(link, "w") as tar:
        info = tarfile.TarInfo("capture.json")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(info)
    assert nobounce("check", "--replay", link).exit_code == 2
    assert nobounce("check", "--replay", tmp_path / "none").exit_code == 3
    assert nobounce("check", "--capture", tmp_path / "no" / "folder.tar").exit_code == 3


@pytest.mark.parametrize("what", ["pipe", "folder"])
def test_a_capture_that_is_no_regular_file_is_refused_unopened(tmp_path: Path, what: str) -> None:
    odd = tmp_path / "odd"
    if what == "pipe":
        os.mkfifo(odd)
    else:
        odd.mkdir()
    command = [sys.executable, "-m", "nobounce", "check", "--replay", str(odd)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert done.stderr == f"nobounce check: {odd}: is a {what}: name a regular file\n"


# speed


def _hundred() -> Tree:
    tree = ready_amd()
    for n in range(100):
        tree.nvme(f"nvme{n + 10}n1", f"0000:{n + 16:02x}:00.0", f"0000:00:{n // 8 + 2:02x}.{n % 8}")
        tree.lvm(f"dm-{n}", f"nvme{n + 10}n1").mount(f"/m{n}", "ext4" if n % 2 else "xfs", f"dm-{n}")
    return tree


@pytest.mark.serial
def test_a_machine_with_100_mounts_takes_under_300_ms(on: Run) -> None:
    for arguments in (["check", "-q"], ["check", "/m7", "-q"]):
        tree = _hundred().file("/m7/x").file("/m7", kind=stat.S_IFDIR)

        def checking(tree: Any = tree, arguments: list[str] = arguments) -> float:
            begin = time.perf_counter()
            assert on(tree, *arguments).exit_code == 0
            return time.perf_counter() - begin

        assert_takes_under(0.3, checking, tries=10)


def test_a_hundred_mounts_of_one_device_are_tried_once(on: Run) -> None:
    tree = ready_amd()
    for n in range(100):
        tree.mount(f"/bind{n}", "xfs", "nvme0n1")
    assert on(tree, "check", "-q").exit_code == 0
    assert sum(question == "probe:direct_in" for question, _ in tree.asked) == 1
    assert sum(key[0].endswith("/transport") for question, key in tree.asked if question == "read") == 1


# topology


def test_topology_prints_a_tree_json_and_a_picture(on: Run, tmp_path: Path) -> None:
    picture = tmp_path / "t.svg"
    done = on(ready_amd(), "topology", "--svg", picture)
    assert done.exit_code == 0
    assert "hip:0" in done.stdout
    assert "└──" in done.stdout
    assert "below one root port" in done.stdout
    assert picture.read_text().startswith("<svg ")
    found = json.loads(on(ready_amd(), "topology", "--json").stdout)
    assert found["schema"] == "nobounce.topology/1"
    assert found["ways"][0]["distance"] == "same-root-port"
    refused = on(ready_amd(), "topology", "--svg", tmp_path / "no" / "t.svg")
    assert refused.exit_code == 1
    assert "t.svg" in refused.output


def test_root_is_told_that_the_environment_names_folders_of_libraries(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ROCM_PATH", "ROCM_HOME", "HIP_PATH", "CUDA_HOME", "CUDA_PATH", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    need("root")
    assert "loaded as root" not in nobounce("check", data, "--device", "cpu").stderr
    monkeypatch.setenv("HIP_PATH", str(tmp_path))
    for arguments in ([str(data), "--device", "cpu"], []):
        told = nobounce("check", *arguments).stderr
        assert (
            f"nobounce check: GPU libraries are also looked for, and loaded as root, where HIP_PATH={tmp_path} says"
            in told
        )
