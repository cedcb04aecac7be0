"""In a forked child what belongs to the parent answers at once, naming fork; files and `cpu` memory go on working."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHILD = """
import asyncio, os, sys, threading, warnings
import nobounce
from nobounce.errors import NobounceError
warnings.simplefilter("ignore", DeprecationWarning)  # of fork beside threads: that is the test
path, name = sys.argv[1:]
data = open(path, "rb").read()
device = nobounce.Device(name)
f, b, s = nobounce.open(path, "r+"), device.allocate(len(data)), device.create_stream()
kept = f.read_async(b, stream=s)
kept.result()
latch = threading.Event()
device._runtime.host_call(s.handle, latch.wait)
under_way = f.read_async(b, stream=s)
event, batch = s.record(), nobounce.Batch()
batch.read(f, b2 := nobounce.Device("cpu").allocate(4096), file_offsets=0, nbytes=4096)

async def waits():
    return await under_way

def refused(what, call):
    try:
        print(what, "answers", call())
    except NobounceError as e:
        if "fork" not in str(e):
            print(what, "says", e)

def child():
    assert under_way.done() and not under_way.running() and not under_way.cancel()
    refused("result", under_way.result)
    refused("await", lambda: asyncio.run(waits()))
    assert "fork" in str(under_way.exception())
    called = []
    under_way.add_done_callback(called.append)
    assert called == [under_way]
    assert kept.result().nbytes == len(data)
    for what in ("sync", "record", "query", "handle", "is_nonblocking"):
        refused(what, lambda: getattr(s, what) if what in ("handle", "is_nonblocking") else getattr(s, what)())
    refused("stream of a read", lambda: f.read_async(b, stream=s))
    refused("submit", batch.submit)
    refused("wait", batch.wait)
    refused("receipt", lambda: batch.receipt)
    refused("add", lambda: batch.read(f, b2, file_offsets=0, nbytes=1))
    if name != "cpu":
        for what, call in {"read": lambda: f.read(b), "copy": lambda: b.copy_to(bytearray(len(data)), stream=None),
                           "fill": lambda: b.fill(0, stream=None), "in_use": lambda: b.in_use().__enter__()}.items():
            refused(what, call)
    for thing in (batch, s, event):
        thing.close()
    cpu = nobounce.Device("cpu")
    inherited = b if name == "cpu" else b2
    n = inherited.nbytes
    assert f.read(inherited).nbytes == n and bytes(inherited.view()) == data[:n]
    with cpu.create_stream() as mine, inherited:
        assert f.read_async(inherited, stream=mine).result(20).nbytes == n
    with nobounce.open(path) as g, cpu.allocate(4096) as own, nobounce.Batch() as mine:
        mine.read(g, own, file_offsets=0, nbytes=4096)
    f.sync()
    f.close()
    b.close()

for _ in range(3):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            child()
            code = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
latch.set()
assert under_way.result(30).nbytes == len(data)
batch.wait().check()
batch.close()
s.sync()
print("ok")
"""


@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_a_child_is_told_at_once(device: str, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(range(256)) * 4096)
    command = [sys.executable, "-c", CHILD, str(path), device]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("ok\n", "", 0)


LOADER = """
import sys, warnings
import torch, nobounce
warnings.simplefilter("ignore", DeprecationWarning)
f = nobounce.open(sys.argv[1])
buf = nobounce.Device("cpu").allocate(4096)

class Pages(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        assert f.read(buf, file_offset=i * 4096).nbytes == 4096
        return int(buf.view()[0])

f.read(buf)
print(sorted(n for batch in torch.utils.data.DataLoader(Pages(), 8, num_workers=2) for n in batch.tolist()))
"""


def test_data_loaders_fork(tmp_path: Path) -> None:
    from capabilities import need

    need("torch")
    path = tmp_path / "f"
    path.write_bytes(b"".join(bytes([i]) * 4096 for i in range(64)))
    command = [sys.executable, "-c", LOADER, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == f"{list(range(64))}\n", done.stderr
