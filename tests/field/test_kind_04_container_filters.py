"""Kind 4: a container's filter answers EPERM (or EACCES) where an old kernel says ENOSYS: whatever is newer than Linux 5.4 or
refused by usual filters has another way, and where there is none the error names the call and the filter.

Each case runs under a real seccomp filter, in a fork of one child that has imported everything.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from capabilities import need
from scale import cases

CALLS = (
    "faccessat2",
    "statx",
    "cachestat",
    "preadv2",
    "pwritev2",
    "io_uring_setup",
    "io_uring_enter",
    "io_uring_register",
    "pidfd_open",
    "process_madvise",
    "memfd_create",
    "clone3",
    "close_range",
    "openat2",
    "renameat2",
    "copy_file_range",
    "mincore",
)
ERRNOS = ("EPERM", "ENOSYS", "EACCES")
SHORT = CALLS[:8]
"""Those with a way of their own here: tried in every run, the others under `make thorough` alone."""
CASES = [
    (call, code) for call in CALLS for code in ERRNOS if cases(1, 0) or (call in SHORT and code == "EPERM")
]
WORK = ("load", "read", "write", "batch", "check", "cp")

CHILD = """
import contextlib, errno, io, json, os, struct, sys, traceback
results = os.fdopen(os.dup(1), "w")  # the command line prints where 1 leads
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
tests, folder, cases = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
sys.path.insert(0, tests)
import numpy as np
import nobounce, nobounce.formats.load, nobounce.io.batch.batch, nobounce.runtimes.host.sim, nobounce.runtimes.host.cpu
import nobounce.cli.main, nobounce.checks.report
import seccomp

MIB = 1 << 20
data = os.urandom(3 * MIB)
path, out = os.path.join(folder, "m.safetensors"), os.path.join(folder, "out")
header = json.dumps({"a": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
content = struct.pack("<Q", len(header)) + header + data
open(path, "wb").write(content)

def each():
    for name in ("cpu", "sim:0"):
        device = nobounce.Device(name)
        with nobounce.open(path) as f, device.create_stream() as s, device.allocate(MIB) as b:
            yield device, f, s, b

def same(a, b):
    if bytes(a) != bytes(b):
        raise SystemExit("other bytes")

def load():
    for name in ("cpu", "sim:0"):
        same(nobounce.load(path, device=name)["a"].numpy(), data)

def read():
    for device, f, s, b in each():
        for cache in ("auto", "use", "avoid"):
            for nbytes in (100, 4096, MIB):
                if f.read(b, nbytes=nbytes, cache=cache).nbytes != nbytes:
                    raise SystemExit("short")
                same(b[:nbytes].to_bytes() if hasattr(b, "to_bytes") else nobounce.Tensor(b, (nbytes,), "U8").numpy(), content[:nbytes])
        f.read_async(b, stream=s, file_offset=MIB).result()
        same(nobounce.Tensor(b, (MIB,), "U8").numpy(), content[MIB : 2 * MIB])

def write():
    for device, f, s, b in each():
        f.read(b)
        for cache in ("auto", "use", "avoid"):
            with nobounce.open(out, "w+") as g:
                for at, nbytes in ((0, 100), (4096, 4096), (8192, MIB)):
                    g.write(b, nbytes=nbytes, file_offset=at, cache=cache, fsync=True)
                g.write_async(b, stream=s, file_offset=2 * MIB).result()
            written = open(out, "rb").read()
            same(written[8192 : 8192 + MIB], content[:MIB]); same(written[2 * MIB :], content[:MIB])

def batch():
    for device, f, s, b in each():
        with nobounce.Batch(capacity=64) as q:
            q.read(f, b, file_offsets=np.arange(64) * 8192, buffer_offsets=np.arange(64) * 4096, nbytes=4096)
            q.wait()
        got = bytes(nobounce.Tensor(b, (64 * 4096,), "U8").numpy())
        same(got, b"".join(content[n * 8192 : n * 8192 + 4096] for n in range(64)))

def cli(*arguments):
    def run():
        sys.argv = ["nobounce", *arguments]
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                nobounce.cli.main.main()
            except SystemExit as e:
                if e.code:
                    raise SystemExit(f"{e.code}: {said.getvalue()}") from None
    return run

with contextlib.redirect_stdout(io.StringIO()):
    sys.argv = ["nobounce", "check", path, "-d", "cpu"]
    with contextlib.suppress(SystemExit):
        nobounce.cli.main.main()  # imports once what each fork would import again
WORK = {"load": load, "read": read, "write": write, "batch": batch,
        "check": cli("check", path, "-d", "cpu"), "cp": cli("cp", path, os.path.join(folder, "copy"))}
open(os.path.join(folder, "copy"), "w").close()  # replaced
for call, code in cases:
    if os.fork() == 0:
        try:
            seccomp.refuse({call: getattr(errno, code)})
            for name, work in WORK.items():
                try:
                    work()
                    how = ""
                except BaseException as e:
                    how = f"{type(e).__name__}: {e}" + "".join(traceback.format_tb(e.__traceback__)[-2:])
                print(json.dumps([call, code, name, how]), file=results, flush=True)
        finally:
            os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, str], str]:
    folder = tmp_path_factory.mktemp("filtered")
    tests = Path(__file__).parents[1]
    command = [sys.executable, "-c", CHILD, str(tests), str(folder), json.dumps(CASES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {(call, code, work): how for call, code, work, how in lines}


@pytest.mark.timeout(330)
@pytest.mark.parametrize(("call", "code"), CASES)
def test_work_is_done_without_the_call(
    outcomes: dict[tuple[str, str, str], str], call: str, code: str
) -> None:
    need("seccomp")
    assert {work: outcomes.get((call, code, work), "nothing was said") for work in WORK} == dict.fromkeys(
        WORK, ""
    )


def test_where_nothing_is_left_the_error_names_the_call_and_the_filter(tmp_path: Path) -> None:
    need("seccomp")
    code = """
import errno, sys
sys.path.insert(0, sys.argv[1])
import nobounce, seccomp
seccomp.refuse({sys.argv[2]: errno.EPERM})
try:
    nobounce.Batch(method="io_uring")
except nobounce.UnavailableError as e:
    print(e)
"""
    for call in ("io_uring_setup", "io_uring_enter"):
        command = [sys.executable, "-c", code, str(Path(__file__).parents[1]), call]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout.startswith(f"{call}: Operation not permitted (EPERM)")
        assert "seccomp profile" in done.stdout


def test_a_file_is_known_without_statx(tmp_path: Path) -> None:
    """All but the alignments: so it is probed, and the verdict is the same."""
    need("seccomp")
    code = """
import errno, os, sys
sys.path.insert(0, sys.argv[1])
import seccomp
from nobounce.facts.statx import statx
fd = os.open(sys.argv[2], os.O_RDONLY)
before = statx(fd)
seccomp.refuse({"statx": errno.EPERM})
after = statx(fd)
blank = {"dio_mem_align": None, "dio_offset_align": None, "dio_read_offset_align": None}
print(before._replace(**blank) == after)
"""
    path = tmp_path / "data"
    path.write_bytes(bytes(8192))
    command = [sys.executable, "-c", code, str(Path(__file__).parents[1]), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "True\n"
