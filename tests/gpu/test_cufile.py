"""cuFile on real hardware: without a carrier we say fallback, although cuFile itself registers and reads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from capabilities import need

_COMPATIBILITY_MODE = """
import os, sys
from cuda.bindings import cufile
from nobounce.runtimes import registry

rt = registry.get("cuda")
a, p = rt.alloc(0, 65536), rt.alloc_pinned(65536)
facts = rt.direct_io().facts(0)
cufile.set_parameter_bool(int(cufile.BoolConfigParameter.PROPERTIES_ALLOW_COMPAT_MODE), True)
cufile.driver_open()
cufile.set_stats_level(3)
cufile.stats_start()
fd = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT)
file = cufile.Descr()
file.type, file.handle.fd = int(cufile.FileHandleType.OPAQUE_FD), fd
handle = cufile.handle_register(file.ptr)
moved = cufile.read(handle, a, 65536, 0, 0)
rt.copy(p, a, 65536)
import ctypes
same = ctypes.string_at(p, 65536) == open(sys.argv[1], "rb").read()
stats = cufile.StatsLevel3()
cufile.get_stats_l3(stats.ptr)
gpu = stats.per_gpu_stats[0]
print(facts.available, facts.code, moved, same, int(gpu.n_posix_reads) > 0, int(gpu.n_nvfs_reads), int(gpu.n_p2p_reads))
cufile.handle_deregister(handle)
os.close(fd)
"""


def test_cufile_in_compatibility_mode_is_no_fastpath(tmp_path: Path) -> None:
    need("cuda", "cuda-bindings", "o_direct", "numpy", "no-nvidia-fs", "cufile-registers")
    path = tmp_path / "data"
    path.write_bytes(os.urandom(65536))
    log = tmp_path / "cufile.log"
    done = subprocess.run(
        [sys.executable, "-c", _COMPATIBILITY_MODE, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "CUFILE_LOGFILE_PATH": str(log)},
    )
    said = log.read_text(errors="replace")[-4000:] if log.exists() else "cuFile logged nothing"
    assert done.returncode == 0, f"{done.stderr}\n{said}"
    assert done.stdout.split() == ["False", "no-nvidia-fs", "65536", "True", "True", "0", "0"], done.stdout
