"""Ctrl-C at random moments: KeyboardInterrupt or the result, nothing else, and what comes next works."""

from __future__ import annotations

import json
import os
import random
import signal
import struct
import subprocess
import sys
import time
import timeit
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import nobounce
from scale import cases

# A standard file object that an interrupt drops is closed by Python, which says so.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

PAGE, NBYTES = 4096, 4 << 20

Call = Callable[[Path, nobounce.Device], object]


BEGUN = """
import sys
sys.argv[0] = "nobounce"
from nobounce.cli import early
early.begin()
print("begun", flush=True)
from nobounce.__main__ import main
main()
"""
"""The command, saying when it has begun: before that an interrupt is the interpreter's to answer."""


def read(path: Path, on: nobounce.Device) -> None:
    with nobounce.open(path) as f, on.allocate(NBYTES) as buffer:
        assert f.read(buffer).nbytes == NBYTES


def read_async(path: Path, on: nobounce.Device) -> None:
    with nobounce.open(path) as f, on.allocate(NBYTES) as buffer, on.create_stream() as stream:
        moves = [
            f.read_async(buffer, stream=stream, nbytes=NBYTES // 4, file_offset=i * NBYTES // 4)
            for i in range(4)
        ]
        try:
            assert sum(m.result().nbytes for m in moves) == NBYTES
        finally:
            stream.sync()


def batch(path: Path, on: nobounce.Device) -> None:
    with nobounce.open(path) as f, on.allocate(NBYTES) as buffer, nobounce.Batch(depth=16) as requests:
        requests.read(f, buffer, file_offsets=np.arange(128) * PAGE, nbytes=PAGE, cache="avoid")
        assert len(requests.wait().check()) == 128


def load(path: Path, on: nobounce.Device) -> None:
    model = nobounce.load(path, device=on)
    assert model.receipt.nbytes >= NBYTES - PAGE


def save(path: Path, on: nobounce.Device) -> None:
    folder = path.parent / "saved"
    folder.mkdir(exist_ok=True)
    with on.allocate(NBYTES) as buffer:
        nobounce.save({"a": buffer, "b": np.ones(PAGE + 1, np.uint8)}, folder / "m", fsync=False)
    assert nobounce.load(folder / "m", device="cpu")["a"].nbytes == NBYTES
    assert set(os.listdir(folder)) == {"m"}


def save_set(path: Path, on: nobounce.Device) -> None:
    folder = path.parent / "set"
    with on.allocate(NBYTES) as buffer:
        tensors = {"a": buffer, "b": np.ones(PAGE + 1, np.uint8)}
        nobounce.save(tensors, folder, max_shard_nbytes=PAGE, fsync=False)
    assert nobounce.load(folder, device="cpu").keys() == tensors.keys()
    assert len(os.listdir(folder)) == 3


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    text = json.dumps({"a": {"dtype": "U8", "shape": [NBYTES - PAGE], "data_offsets": [0, NBYTES - PAGE]}})
    header = text.encode().ljust(PAGE - 8)
    path.write_bytes(struct.pack("<Q", len(header)) + header + random.Random(2).randbytes(NBYTES - PAGE))
    return path


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
@pytest.mark.parametrize("call", [read, read_async, batch, load, save, save_set])
def test_an_interrupt_is_keyboard_interrupt_or_comes_too_late(model: Path, call: Call, device: str) -> None:
    on = nobounce.Device(device)
    call(model, on)
    seconds = min(timeit.repeat(lambda: call(model, on), number=1, repeat=5))  # not one that was held up
    chosen = random.Random(f"{call.__name__} {device}")
    before, hit = signal.signal(signal.SIGALRM, signal.default_int_handler), 0
    try:
        for _ in range(cases(1000, 15)):
            try:
                signal.setitimer(signal.ITIMER_REAL, chosen.uniform(1e-5, 1.2 * seconds))
                call(model, on)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                hit += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    call(model, on)
    assert hit


@pytest.mark.parametrize("verb", ["load", "cp", "roundtrip", "report", "convert", "diff"])
def test_an_interrupted_command_ends_by_130_or_with_its_work(model: Path, tmp_path: Path, verb: str) -> None:
    trace = tmp_path / "trace.json"
    arguments = {
        "load": [str(model), "--device", "cpu"],
        "cp": [str(model), str(tmp_path / "copy"), "--device", "sim:0"],
        "roundtrip": [str(tmp_path / "a"), str(tmp_path / "b"), "--device", "cpu", "--overwrite"],
        "convert": [str(model), str(tmp_path / "converted")],
        "diff": [str(model), str(model)],
        "report": [str(trace), "-o", str(tmp_path / "report.html")],
    }[verb]
    command = [sys.executable, "-c", BEGUN, verb, *arguments]
    if verb == "report":
        environment = {**os.environ, "NOBOUNCE_TRACE": str(trace)}
        subprocess.run(
            [sys.executable, "-m", "nobounce", "load", str(model), "--device", "cpu"],
            env=environment,
            check=True,
            capture_output=True,
            timeout=60,
        )
        trace = next(tmp_path.glob("trace*.json"))
        command[command.index(str(tmp_path / "trace.json"))] = str(trace)
    begin = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    seconds = time.perf_counter() - begin
    kept = set(os.listdir(tmp_path))
    chosen = random.Random(verb)
    for _ in range(cases(250, 2)):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "begun\n"
            time.sleep(chosen.uniform(0, 1.1) * seconds)
            child.send_signal(signal.SIGINT)
            _, told = child.communicate(timeout=100)
        assert (child.returncode, told) in [
            (0, ""),
            (130, f"nobounce {verb}: interrupted\n"),
            (130, "nobounce: interrupted\n"),
            (-signal.SIGINT, ""),  # in the interpreter's own end, with the work done
        ]
        assert set(os.listdir(tmp_path)) <= kept
