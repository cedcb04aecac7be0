"""The command line as a person and a script see it."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from nobounce import config
from nobounce.cli import ending
from nobounce.cli.main import app
from nobounce.cli.options import parse_size
from nobounce.cli.output import progress
from nobounce.cli.roundtrip import fnv1a, fnv1a_block
from nobounce.errors import ArgumentError, TransferCancelledError
from nobounce.io.receipt import Receipt
from nobounce.io.transfer import Transfer
from nobounce.runtimes import faults

MIB = 1 << 20


def nobounce(*arguments: str | Path, env: dict[str, str] | None = None) -> Result:
    config.override(None)
    return CliRunner().invoke(app, [str(a) for a in arguments], env=env)


@contextmanager
def a_terminal() -> Iterator[tuple[int, bytearray]]:
    """A terminal, and all that was written to it once the block is left (a write waits where nobody reads)."""
    parent, child = pty.openpty()
    seen = bytearray()

    def read() -> None:
        try:
            while piece := os.read(parent, 4096):
                seen.extend(piece)
        except OSError:
            pass  # the terminal is gone once its last writer is

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield child, seen
    finally:
        os.close(child)
        reader.join()
        os.close(parent)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    header = {
        "a": {"dtype": "F32", "shape": [256, 1024], "data_offsets": [0, MIB]},
        "odd": {"dtype": "U8", "shape": [3], "data_offsets": [MIB, MIB + 3]},
        "b\x1b[2J": {"dtype": "BF16", "shape": [5], "data_offsets": [MIB + 3, MIB + 13]},
        "__metadata__": {"format": "pt"},
    }
    raw = json.dumps(header).encode()
    path = tmp_path / "m.safetensors"
    with path.open("wb") as f:
        f.write(struct.pack("<Q", len(raw)) + raw + os.urandom(MIB + 13))
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


def test_load_says_where_each_byte_went(model: Path) -> None:
    done = nobounce("load", model, "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert "fastpath" in done.stdout
    assert "3 tensors" in done.stdout


def test_load_json_has_the_documented_fields(model: Path) -> None:
    done = nobounce("load", model, "--device", "sim:0", "--json")
    data = json.loads(done.stdout)
    assert data["schema"] == "nobounce.load/1"
    assert {"version", "nbytes", "seconds", "tensors", "receipt"} <= data.keys()
    assert set(data["receipt"]) == {
        "fastpath_bytes",
        "fallback_bytes",
        "cached_bytes",
        "host_traffic_bytes",
        "reasons",
        "retries",
        "evidence",
        "hole_bytes",
    }
    documented = (Path(__file__).parents[2] / "docs" / "json.md").read_text()
    assert set(data["receipt"]) == set(re.findall(r"^\| `receipt\.(\w+)` \|", documented, re.MULTILINE))
    assert set(data["receipt"]) < set(dir(Receipt)), "a field of the JSON has the name that the API gives it"
    assert data["tensors"] == 3


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_load_makes_arrays(model: Path, framework: str) -> None:
    assert nobounce("load", model, "--device", "cpu", "--framework", framework).exit_code == 0


def test_require_that_cannot_hold_is_1_with_refusals(model: Path, tmp_path: Path) -> None:
    with faults.inject(op="direct", device="sim:0", because="no P2P on this machine"):
        done = nobounce("load", model, "--device", "sim:0", "--require", "fastpath", "--json")
    assert done.exit_code == 1
    error = json.loads(done.stdout)["error"]
    assert error["type"] == "RouteError"
    assert error["refusals"][0]["code"] == "no-p2p"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["load", "/nowhere.safetensors"], 1),
        (["load", "{model}", "--device", "gpu:7"], 2),
        (["load", "{model}", "--require", "sometimes"], 2),
        (["load"], 2),
        (["explain", "/nowhere"], 1),
        (["inspect", "/"], 1),
        (["frobnicate"], 2),
        (["roundtrip", "{model}", "{model}"], 2),
        (["roundtrip", "/tmp", "/tmp/x", "--slice", "big"], 2),
        (["cp", "/nowhere", "/tmp/x"], 1),
        (["cp", "{model}", "{model}"], 2),
    ],
)
def test_exit_codes_are_those_of_the_docs(model: Path, arguments: list[str], code: int) -> None:
    done = nobounce(*[a.format(model=model) for a in arguments])
    assert done.exit_code == code, done.output
    assert "Traceback" not in done.output


def test_a_bad_variable_is_usage_and_named(model: Path) -> None:
    done = nobounce("load", model, "--device", "cpu", env={"HIPFILE_FORCE_COMPAT_MODE": "maybe"})
    assert done.exit_code == 2
    assert "HIPFILE_FORCE_COMPAT_MODE" in done.output


def test_explain_shows_routes_refusals_and_cures_without_reading_data(model: Path) -> None:
    done = nobounce("explain", model, "--device", "cpu")
    assert done.exit_code == 0
    assert "fastpath" in done.stdout
    done = nobounce("explain", model, "--json", "--device", "cpu", env={"HIPFILE_FORCE_COMPAT_MODE": "1"})
    route = json.loads(done.stdout)["routes"][0]
    assert route["segments"][0]["reason"] == "fastpath-disabled"
    assert route["scores"][0]["refusals"][0]["cure"]


def test_explain_takes_any_file(tmp_path: Path) -> None:
    path = tmp_path / "plain.bin"
    path.write_bytes(os.urandom(10_000))
    done = nobounce("explain", path, "--json", "--device", "cpu", "--cache", "avoid")
    segments = json.loads(done.stdout)["routes"][0]["segments"]
    assert [s["reason"] for s in segments] == ["direct", "unaligned-edge"]


def test_inspect_lists_tensors_and_escapes_names(model: Path) -> None:
    done = nobounce("inspect", model)
    assert done.exit_code == 0
    assert "\x1b" not in done.stdout
    assert "moved on load" in done.stdout
    data = json.loads(nobounce("inspect", model, "--json").stdout)
    by_name = {t["name"]: t for t in data["tensors"]}
    assert by_name["a"]["shape"] == [256, 1024]
    assert not by_name["b\x1b[2J"]["aligned_for_dtype"]
    assert data["files"][0]["metadata"] == {"format": "pt"}


def test_config_shows_what_is_in_force_and_why() -> None:
    done = nobounce("config", "--json", env={"HIPFILE_ALLOW_COMPAT_MODE": "off"})
    values = {v["name"]: v for v in json.loads(done.stdout)["variables"]}
    assert values["HIPFILE_ALLOW_COMPAT_MODE"]["value"] is False
    assert values["HIPFILE_ALLOW_COMPAT_MODE"]["origin"] == "environment"
    assert values["HIPFILE_FORCE_COMPAT_MODE"]["origin"] == "default"
    assert "cpu" in nobounce("config").stdout


def test_config_says_once_why_a_runtime_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nobounce.device.unavailable", lambda: {"hip": "hip: unavailable, because so"})
    assert nobounce("config").stdout.splitlines()[-1].strip() == "hip: unavailable, because so"


def test_output_that_cannot_be_written_is_a_sentence(model: Path) -> None:
    for arguments in (["inspect", str(model)], ["load", str(model), "--json"]):
        with open("/dev/full", "wb") as full:
            done = subprocess.run(
                [sys.executable, "-m", "nobounce", *arguments], stdout=full, stderr=subprocess.PIPE, text=True
            )
        assert done.returncode == 1
        assert done.stderr == (
            f"nobounce {arguments[0]}: cannot write to stdout: No space left on device (ENOSPC)\n"
        )


def test_a_tensor_s_name_is_escaped_once(tmp_path: Path) -> None:
    raw = json.dumps({"t\x1b[2J": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(8))
    assert r"tensor 't\x1b[2J'" in nobounce("inspect", bad).stderr


def test_config_names_a_contradiction() -> None:
    done = nobounce("config", env={"HIPFILE_ALLOW_COMPAT_MODE": "no", "HIPFILE_FORCE_COMPAT_MODE": "yes"})
    assert done.exit_code == 2
    assert "HIPFILE_ALLOW_COMPAT_MODE" in done.output


def test_progress_goes_to_a_terminal_on_stderr_only(model: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "from nobounce.cli.main import main; main()",
        "load",
        str(model),
        "--device",
        "cpu",
    ]
    quiet = subprocess.run(command, capture_output=True, check=True, timeout=60)
    assert quiet.stderr == b""
    with a_terminal() as (child, seen):
        shown = subprocess.run(command, stdout=subprocess.PIPE, stderr=child, check=True, timeout=60)
    assert b"load" in seen
    assert b"tensors" in shown.stdout


def test_progress_counts_in_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_terminal() as (child, seen), open(child, "w", closefd=False) as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with progress(100 << 30, "load") as advance:
            assert advance is not None
            for _ in range(3):
                advance("fastpath", 1 << 30)
    assert b" GiB/s" in seen
    assert b"fastpath" in seen


# roundtrip


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
@pytest.mark.parametrize("require", ["auto", "fastpath", "fallback"])
def test_roundtrip_prints_hipfile_s_line_and_bytes_per_backend(
    tmp_path: Path, device: str, require: str
) -> None:
    read, write = tmp_path / "r", tmp_path / "w"
    done = nobounce("roundtrip", read, write, "--device", device, "--require", require, "--slice", "64KiB")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[0] == (
        f"OK  {read} == {write}  (262144 bytes across 4 registered streams, hash 0x{fnv1a(str(read))[0]:016x})"
    )
    bounced = 2 * 262144 if require == "fallback" else 0
    assert f"fastpath {2 * 262144 - bounced} bytes, fallback {bounced} bytes" in done.stdout
    assert read.read_bytes() == write.read_bytes() == bytes(range(256)) * 1024


def test_the_hash_of_the_published_example() -> None:
    """FNV-1a 64 of 4 MiB of the pattern, as the published example computes it; of nothing, its offset basis."""
    import tempfile

    with tempfile.NamedTemporaryFile() as f:
        assert fnv1a(f.name) == (0xCBF29CE484222325, 0)
        f.write(b"foobar")
        f.flush()
        assert fnv1a(f.name) == (0x85944171F73967E8, 6)


@pytest.mark.parametrize("nbytes", [1, 2, 255, 70_001])
def test_the_hash_of_whole_blocks_is_that_of_a_loop_over_bytes(nbytes: int) -> None:
    data = os.urandom(nbytes)
    value = 0xCBF29CE484222325
    for byte in data:
        value = ((value ^ byte) * 0x100000001B3) & ((1 << 64) - 1)
    cut = nbytes // 3
    begun = fnv1a_block(0xCBF29CE484222325, data[:cut]) if cut else 0xCBF29CE484222325
    assert fnv1a_block(begun, data[cut:]) == value


def test_roundtrip_knows_a_file_by_its_second_name(tmp_path: Path) -> None:
    read, write = tmp_path / "r", tmp_path / "w"
    read.write_bytes(b"mine")
    write.hardlink_to(read)
    done = nobounce("roundtrip", read, write, "--device", "cpu", "--keep-input", "--overwrite")
    assert done.exit_code == 2
    assert "same file" in done.stderr
    assert read.read_bytes() == b"mine"


@pytest.mark.parametrize("which", ["READ", "WRITE"])
@pytest.mark.parametrize(
    ("what", "said"),
    [("folder", "EISDIR"), ("pipe", "is a pipe"), ("nowhere", "ENOENT"), ("device", "character")],
)
def test_roundtrip_names_what_is_no_file(tmp_path: Path, which: str, what: str, said: str) -> None:
    odd = tmp_path / "odd"
    if what == "folder":
        odd.mkdir()
    elif what == "pipe":
        os.mkfifo(odd)
    elif what == "nowhere":
        odd = odd / "r"
    else:
        odd = Path("/dev/null")
    other = tmp_path / "other"
    other.write_bytes(b"mine")
    pair = (odd, other) if which == "READ" else (other, odd)
    done = nobounce("roundtrip", *pair, "--device", "cpu", "--overwrite")
    assert done.exit_code == 1, done.output
    assert f"{odd}: " in done.stderr
    assert said in done.stderr
    if what != "nowhere":
        assert other.read_bytes() == b"mine"


def test_roundtrip_refuses_to_touch_files_that_hold_data(tmp_path: Path) -> None:
    read, write = tmp_path / "r", tmp_path / "w"
    read.write_bytes(b"mine")
    done = nobounce("roundtrip", read, write, "--device", "cpu")
    assert done.exit_code == 2
    assert read.read_bytes() == b"mine"
    read.unlink()
    write.write_bytes(b"mine")
    assert nobounce("roundtrip", read, write, "--device", "cpu").exit_code == 2
    assert write.read_bytes() == b"mine"
    assert nobounce("roundtrip", read, write, "--device", "cpu", "--overwrite").exit_code == 0


def test_roundtrip_without_room_for_its_files_writes_nothing(tmp_path: Path) -> None:
    read, write = tmp_path / "r", tmp_path / "w"
    for arguments in (["--slice", "4096TiB"], ["--streams", "1024", "--slice", "1TiB"]):
        done = nobounce("roundtrip", read, write, "--device", "cpu", *arguments)
        assert done.exit_code == 2
        assert f"{tmp_path} has no room for" in done.stderr
        assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("nbytes", [1, 5000, 3 * MIB + 77])
def test_roundtrip_keeps_an_input_of_any_size(tmp_path: Path, nbytes: int) -> None:
    read, write = tmp_path / "r", tmp_path / "w"
    data = os.urandom(nbytes)
    read.write_bytes(data)
    done = nobounce(
        "roundtrip", read, write, "--device", "sim:0", "--keep-input", "--slice", "1MiB", "--streams", "3"
    )
    assert done.exit_code == 0, done.output
    assert read.read_bytes() == write.read_bytes() == data


def test_an_interrupted_roundtrip_begins_no_further_transfer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = tmp_path / "r"
    read.write_bytes(bytes(64 * MIB))
    wait, done_at = Transfer.result, []

    def interrupted(self: Transfer, timeout: float | None = None) -> Receipt:
        if len(done_at) == 2:
            raise KeyboardInterrupt
        receipt = wait(self, timeout)
        done_at.append(receipt)
        return receipt

    cancel, cancelled = Transfer.cancel, []

    def slowly(self: Transfer) -> bool:
        worked = cancel(self)
        cancelled.append(self)
        time.sleep(0.01)  # the stream goes on behind it meanwhile
        return worked

    monkeypatch.setattr(Transfer, "result", interrupted)
    monkeypatch.setattr(Transfer, "cancel", slowly)
    with faults.inject(op="write", device="sim:0", latency=0.05) as writes:
        done = nobounce(
            "roundtrip", read, tmp_path / "w", "--device", "sim:0", "--keep-input", "--streams", "1"
        )
    assert done.exit_code == 130, done.output
    assert done.stderr == "nobounce roundtrip: interrupted\n"
    assert 0 < writes.calls < 32
    ends = [transfer.exception(0) for transfer in cancelled]
    assert any(ends)
    assert all(end is None or isinstance(end, TransferCancelledError) for end in ends), ends
    assert os.listdir(tmp_path) == ["r"]


def test_roundtrip_shows_how_far_it_has_compared(tmp_path: Path) -> None:
    read, write = tmp_path / "r", tmp_path / "w"
    read.write_bytes(os.urandom(16 * MIB))
    command = [
        sys.executable,
        "-m",
        "nobounce",
        "roundtrip",
        str(read),
        str(write),
        "--keep-input",
        "--device",
        "cpu",
    ]
    with a_terminal() as (child, seen):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=child, check=True, timeout=60)
    assert b"compare" in seen
    assert b"32.0/32.0 MiB" in seen, "both files"
    assert done.stdout.startswith(b"OK  ")


@pytest.mark.parametrize("nbytes", [0, 1, 4 * MIB, 9 * MIB + 5])
def test_the_hash_counts_every_byte_once(tmp_path: Path, nbytes: int) -> None:
    path, steps = tmp_path / "x", []
    path.write_bytes(bytes(nbytes))
    assert fnv1a(str(path), lambda _, n: steps.append(n)) == fnv1a(str(path))
    assert sum(steps) == nbytes
    assert len(steps) <= nbytes // (4 * MIB) + 1


def test_roundtrip_with_lost_bytes_goes_to_stderr_with_1(tmp_path: Path) -> None:
    with faults.inject(op="write", device="sim:0", error=5, times=1):
        done = nobounce("roundtrip", tmp_path / "r", tmp_path / "w", "--device", "sim:0")
    assert done.exit_code == 1
    assert "OK" not in done.stdout
    assert "EIO" in done.stderr
    assert "hash mismatch" in done.stderr


@pytest.mark.parametrize(
    ("text", "nbytes"), [("1MiB", MIB), ("64k", 65536), ("4096", 4096), ("2 GiB", 2 << 30)]
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size("--slice", text) == nbytes


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5M", "1TiBs"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(ArgumentError):
        parse_size("--slice", text)


# cp


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
@pytest.mark.parametrize("nbytes", [0, 1, 4096, 100_001, 70 * MIB + 5])
def test_cp_copies_any_file_through_device_memory(tmp_path: Path, device: str, nbytes: int) -> None:
    source, dest = tmp_path / "s", tmp_path / "d"
    data = os.urandom(nbytes)
    source.write_bytes(data)
    source.chmod(0o640)
    done = nobounce("cp", source, dest, "--device", device)
    assert done.exit_code == 0, done.output
    assert dest.read_bytes() == data
    assert dest.stat().st_mode & 0o777 == 0o640
    assert sorted(os.listdir(tmp_path)) == ["d", "s"]


def test_cp_into_a_folder_keeps_the_name(tmp_path: Path) -> None:
    (tmp_path / "s").write_bytes(b"x")
    (tmp_path / "into").mkdir()
    assert nobounce("cp", tmp_path / "s", tmp_path / "into", "--device", "cpu").exit_code == 0
    assert (tmp_path / "into" / "s").read_bytes() == b"x"


def test_cp_replaces_regular_files_alone_and_what_a_link_names(tmp_path: Path) -> None:
    source, pipe, link, named = (tmp_path / n for n in ("s", "pipe", "link", "named"))
    source.write_bytes(b"data")
    os.mkfifo(pipe)
    done = nobounce("cp", source, pipe, "--device", "cpu")
    assert done.exit_code == 2
    assert "no regular file" in done.stderr
    assert pipe.is_fifo()
    named.write_bytes(b"old")
    link.symlink_to(named)
    assert nobounce("cp", source, link, "--device", "cpu").exit_code == 0
    assert link.is_symlink()
    assert named.read_bytes() == b"data"


def test_a_failed_cp_leaves_the_old_file_whole(tmp_path: Path) -> None:
    source, dest = tmp_path / "s", tmp_path / "d"
    source.write_bytes(os.urandom(3 * MIB))
    dest.write_bytes(b"old")
    with faults.inject(op="write", device="sim:0", error=5):
        assert nobounce("cp", source, dest, "--device", "sim:0").exit_code == 1
    assert dest.read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == ["d", "s"]


INTERRUPTED = """
import os, sys
from nobounce.cli.main import main
from nobounce.io.job import Job
from nobounce.runtimes import faults

begin = Job.begin
def begun(self, *arguments):
    begin(self, *arguments)
    os.write(1, b"begun\\n")  # whole, also where several threads do
Job.begin = begun
with faults.inject(op="read", latency=0.2):
    main()
"""


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
@pytest.mark.parametrize("verb", ["cp", "load"])
@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGINT, "interrupted"),
        (signal.SIGTERM, "ended by SIGTERM"),
        (signal.SIGHUP, "ended by SIGHUP"),
    ],
)
def test_a_signal_that_ends_is_one_line_128_and_its_number_and_leaves_no_half_file(
    tmp_path: Path, verb: str, device: str, number: signal.Signals, words: str
) -> None:
    dest, source = tmp_path / "d", tmp_path / "m.safetensors"
    dest.write_bytes(b"old")
    nbytes = 256 * MIB
    header = json.dumps({"a": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}).encode()
    source.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(source, 8 + len(header) + nbytes)
    names = [source, dest] if verb == "cp" else [source]
    command = [sys.executable, "-c", INTERRUPTED, verb, *map(str, names), "--device", device]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "begun\n"
        child.send_signal(number)
        _, told = child.communicate(timeout=60)
    assert told == f"nobounce {verb}: {words}\n"
    assert child.returncode == 128 + number
    assert sorted(os.listdir(tmp_path)) == ["d", "m.safetensors"]
    assert dest.read_bytes() == b"old"


@pytest.mark.parametrize("second", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_does_not_end_the_tidying_up(tmp_path: Path, second: signal.Signals) -> None:
    """As service managers and closing terminals send them."""
    source = tmp_path / "s"
    source.write_bytes(b"")
    os.truncate(source, 64 * MIB)
    slow = """
plain_open = os.open
def without_tmpfile(path, flags, *arguments, **options):
    if flags & os.O_TMPFILE == os.O_TMPFILE:
        raise OSError(95, "no O_TMPFILE")
    return plain_open(path, flags, *arguments, **options)
os.open = without_tmpfile
plain = os.unlink
def unlink(path, *arguments, **options):
    if ".nobounce-" in str(path):
        os.write(1, b"tidying up\\n")
        os.read(0, 1)
    plain(path, *arguments, **options)
os.unlink = unlink
"""
    code = INTERRUPTED.replace("with faults", f"{slow}with faults")
    command = [sys.executable, "-c", code, "cp", str(source), str(tmp_path / "d"), "--device", "cpu"]
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, text=True, **pipes) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "begun\n"
        child.send_signal(signal.SIGTERM)
        while child.stdout.readline() != "tidying up\n":
            assert child.poll() is None
        child.send_signal(second)
        _, told = child.communicate("x", timeout=60)
    assert told == "nobounce cp: ended by SIGTERM\n"
    assert child.returncode == 143
    assert os.listdir(tmp_path) == ["s"]


@pytest.mark.parametrize("last", ["time.sleep(60)", "sys.exit(0)"])
def test_a_command_that_does_not_end_in_its_time_is_ended(last: str) -> None:
    """Also where it hangs in what the interpreter does at its own end."""
    code = f"""
import atexit, os, signal, sys, time
from nobounce.cli import ending
ending.GRACE_SECONDS = 0.0
atexit.register(time.sleep, 60)
with ending.orderly():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except ending.Ended:
        {last}
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=50
    )
    assert (done.returncode, done.stderr) == (143, "nobounce: ended by SIGTERM\n")


def test_a_signal_that_was_an_answer_ends_nothing() -> None:
    code = """
import os, signal, time
from nobounce.cli import ending
ending.GRACE_SECONDS = 0.0
with ending.orderly():
    for _ in range(2):
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except ending.Ended:
            ending.resume()
    time.sleep(1.5)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_handlers_are_put_back_and_on_other_threads_none_is_set() -> None:
    before = [signal.getsignal(number) for number in ending.SIGNALS]
    with ending.orderly():
        inside = [signal.getsignal(number) for number in ending.SIGNALS]
        other: list[Any] = []

        def look() -> None:
            with ending.orderly():
                other.append([signal.getsignal(number) for number in ending.SIGNALS])

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert [signal.getsignal(number) for number in ending.SIGNALS] == before
    assert other == [inside]
    assert not set(inside) & set(before)


def test_under_nohup_a_hangup_ends_nothing(tmp_path: Path) -> None:
    source, dest = tmp_path / "s", tmp_path / "d"
    source.write_bytes(os.urandom(MIB))
    command = [sys.executable, "-c", INTERRUPTED, "cp", str(source), str(dest), "--device", "cpu"]
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGHUP, old)
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "begun\n"
        child.send_signal(signal.SIGHUP)
        child.communicate(timeout=60)
    assert child.returncode == 0
    assert dest.read_bytes() == source.read_bytes()


@pytest.mark.parametrize(
    "where",
    [
        "sys.meta_path.insert(0, Loading('typer'))",
        "sys.meta_path.insert(0, Loading('nobounce.cli.bench'))",
        "import typer.main; typer.main.get_group_from_info = interrupt",
        "import nobounce.cli.config as verb; verb.run = interrupt",
    ],
)
def test_ctrl_c_before_a_verb_has_begun_is_one_line_and_130(where: str) -> None:
    code = f"""
import os, runpy, signal, sys, time
def interrupt(*_, **__):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(9)
class Loading:
    def __init__(self, name):
        self.name = name
    def find_spec(self, name, path=None, target=None):
        if name == self.name:
            interrupt()
{where}
sys.argv[1:] = ["config"]
runpy.run_module("nobounce", run_name="__main__", alter_sys=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stderr == "nobounce: interrupted\n"
    assert done.returncode == 130


def test_every_verb_has_help_and_is_in_the_docs() -> None:
    listed: dict[str, Any] = {c.name: c for c in app.registered_commands}
    text = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    for name in listed:
        assert f"nobounce {name}" in text, f"docs/cli.md does not name {name}"
        done = nobounce(name, "--help")
        assert done.exit_code == 0


def test_every_variable_is_in_the_docs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "cli.md").read_text().split("## Variables")[1]
    assert [v.name for v in config.VARIABLES if f"`{v.name}`" not in text] == []
