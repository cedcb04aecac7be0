"""Case C98 on real hardware: what is asked of one device leaves another alone, and the caller's current device is kept."""

from __future__ import annotations

import subprocess
import sys

from capabilities import need

_CHILD = """
import ctypes, threading
from cuda.bindings import driver
from nobounce.runtimes import registry

rt = registry.get("cuda")
untouched = lambda: not driver.cuDevicePrimaryCtxGetState(0)[2]
assert untouched() and rt.current_device() == 0
a, p = rt.alloc(1, 8192), rt.alloc_pinned(8192)
assert rt.pointer_info(p).kind.value == "pinned" and rt.pointer_info(a).device == 1
assert untouched(), "alloc"
ctypes.memset(p, 7, 8192)
s = rt.stream_create(1)
e, f = rt.event_create(1), rt.event_create(1)
rt.event_record(e, s)
rt.copy_async(a, p, 8192, s)
rt.fill_async(a, 3, 4096, s)
rt.fill_async(a + 4096, 0x0404, 2048, s, 2)
rt.event_record(f, s)
rt.stream_wait_event(s, f)
rt.host_call(s, lambda: None)
reached = threading.Event()
gate = rt.gate(s, reached.set)
assert reached.wait(30)
gate.open()
rt.stream_sync(s)
assert rt.event_elapsed(e, f) >= 0
assert untouched(), "stream work"
rt.copy(p, a, 8192)
assert ctypes.string_at(p, 8192) == b"\\3" * 4096 + b"\\4" * 2048 + b"\\7" * 2048
rt.fill(a, 9, 8192)
rt.register_host(q := (ctypes.addressof(block := ctypes.create_string_buffer(16384)) + 4095) // 4096 * 4096, 4096)
rt.unregister_host(q)
rt.device_sync(1)
before = rt.current_device()
rt.set_current_device(1)
rt.fill_async(a, 1, 16, 0)
rt.stream_sync(0)
rt.set_current_device(before)
assert rt.current_device() == 0
rt.event_destroy(e), rt.event_destroy(f), rt.stream_destroy(s)
rt.free(a), rt.free_pinned(p)
assert untouched(), "giving back"
print("device 0 untouched")
"""


def test_C98_device_0_is_not_started_by_work_on_device_1() -> None:
    need("two-cuda-devices", "cuda-bindings")
    done = subprocess.run([sys.executable, "-c", _CHILD], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "untouched" in done.stdout
