"""Kind 10: where no further thread can be started (pids.max, `ulimit -u`), one thread is enough for every verb and call, and what
only helps never costs the work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from capabilities import need

VERBS: dict[str, list[str]] = {
    "load": ["load {model} -d sim:0"],
    "explain": ["explain {model}"],
    "inspect": ["inspect {model}"],
    "check": ["check {model} --probe -d cpu"],
    "cp": ["cp {model} {folder}/copy -d sim:0"],
    "roundtrip": ["roundtrip {folder}/one {folder}/other -d sim:0"],
    "config": ["config"],
    "topology": ["topology"],
    "stats": ["stats -- {python} {script}"],
    "trace": ["trace -o {folder}/t.json -- {python} {script}"],
    "report": ["trace -o {folder}/t.json -- {python} {script}", "report {folder}/t.json -o {folder}/t.html"],
    "compare": ["compare {model} --rounds 1 --size 4MiB -d sim:0"],
    "convert": ["convert {model} {folder}/c", "diff {model} {folder}/c"],
    "verify": ["verify {model} --record", "verify {model}"],
    "bench": ["bench {folder} --size 4MiB --rounds 1 -d sim:0"],
}
"""Every verb, and what it is given."""

CALLS = """
import nobounce, numpy as np, asyncio, os
from nobounce import hipfile
model, folder = sys.argv[2], sys.argv[3]
for name in ("cpu", "sim:0"):
    device = nobounce.Device(name)
    whole = open(model, "rb").read()
    assert nobounce.load(model, device=device)["a"].numpy().tobytes() == whole[-NBYTES:]
    with nobounce.open(model) as f, nobounce.open(folder + "/out", "w+") as g, device.allocate(NBYTES) as b, device.create_stream() as s, device.create_stream() as s2:
        assert f.read(b).nbytes == NBYTES
        t = f.read_async(b, stream=s)
        e = s.record()
        s2.wait(e)
        w = g.write_async(b, stream=s2)
        s2.sync()
        assert t.done() and w.done() and e.is_done and g.nbytes == NBYTES
        async def wait():
            return (await f.read_async(b, stream=s)).nbytes
        assert asyncio.run(wait()) == NBYTES
        for method in ("auto", "threads"):
            with nobounce.Batch(method=method) as q:
                q.read(f, b, file_offsets=np.arange(64) * 8192, buffer_offsets=np.arange(64) * 8192, nbytes=5000)
                assert all(x.error is None for x in q.wait())
        s.sync()
        nobounce.save({"a": b, "b": np.arange(5)}, folder + "/saved")
        nobounce.save_async({"a": b}, folder + "/set", max_shard_nbytes=1 << 20).result()
    assert nobounce.load(folder + "/set", device="cpu")["a"].tobytes() == whole[:NBYTES]
    with nobounce.open(folder + "/out") as g:
        assert open(folder + "/out", "rb").read() == whole[:NBYTES]
"""
CHILD = """
import json, os, struct, sys
NBYTES = 40 << 20
sys.path.insert(0, sys.argv[1])
import errno, seccomp
seccomp.refuse({"clone3": errno.EPERM})
import threading
try:
    threading.Thread(target=print).start()
    raise SystemExit("a thread could be started")
except RuntimeError:
    pass
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    nbytes = 40 << 20
    header = json.dumps({"a": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}).encode()
    path = tmp_path_factory.mktemp("alone") / "m.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(range(256)) * (nbytes >> 8))
    return path


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CHILD + code, str(Path(__file__).parents[1]), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)


def test_every_call_works_on_the_one_thread(model: Path, tmp_path: Path) -> None:
    need("seccomp", "numpy")
    done = run("os.environ['OPENBLAS_NUM_THREADS'] = '1'" + CALLS, str(model), str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_works_on_the_one_thread(model: Path, tmp_path: Path, verb: str) -> None:
    need("seccomp", *(["xxhash"] if verb == "verify" else []))
    script = tmp_path / "program.py"
    script.write_text(f"import nobounce; print(nobounce.load({str(model)!r}, device='cpu').receipt.nbytes)")
    words = {"model": model, "folder": tmp_path, "python": sys.executable, "script": script}
    for line in VERBS[verb]:
        arguments = line.format(**words).split()
        done = run(f"sys.argv = ['nobounce', *{arguments!r}]\nfrom nobounce.cli.main import main\nmain()")
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
