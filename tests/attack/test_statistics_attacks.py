"""Another user against the statistics: at the collector of `nobounce stats -- PROGRAM`, and as the target of `nobounce stats -p`."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from capabilities import nobody_command
from nobounce.errors import NobounceError
from nobounce.observe import collect
from nobounce.observe.attach import attach
from nobounce.observe.collect import Collector
from scale import cases

STRANGER = """
import array, fcntl, os, random, resource, socket, sys
from nobounce.config import Settings
from nobounce.observe import export
from nobounce.observe.counters import Counters
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
drop()
memory, sealed = export.make_memory()
Counters(Settings(), memory).words[20] += 1
pipe = os.pipe()
name, chance, held = "\\0" + sys.argv[1], random.Random(int(sys.argv[2])), []
print("begun", flush=True)
while True:
    s = socket.socket(socket.AF_UNIX)
    s.settimeout(2)
    try:
        s.connect(name)
        what = chance.choice(["silent", "silent", "short", "long", "slow", "descriptors", "gone", "shut"])
        if what == "silent":
            held.append(s)
        elif what == "short":
            s.send(chance.randbytes(chance.randrange(1, 32)))
        elif what == "long":
            s.send(chance.randbytes(1 << 16))
        elif what == "slow":
            s.send(b"0")
            held.append(s)
        elif what == "descriptors":
            fds = [chance.choice([sealed, *pipe]) for _ in range(chance.randrange(1, 200))]
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
            s.sendmsg([b"%032x" % chance.getrandbits(128)], [rights])
        elif what == "shut":
            s.shutdown(socket.SHUT_WR)
    except OSError:
        pass
    if s not in held:
        s.close()
    while len(held) > 1000:
        held.pop(chance.randrange(len(held))).close()
"""

HONEST = """
import os, sys, time
from nobounce.config import Settings
from nobounce.observe import export
from nobounce.observe.counters import Counters
for i in range(int(sys.argv[2])):
    pid = os.fork()
    if pid == 0:
        memory, fd = export.make_memory()
        counters = Counters(Settings(), memory)
        begin = time.monotonic()
        export.introduce(fd, sys.argv[1])
        late = time.monotonic() - begin
        counters.pinned("cpu", i + 1)  # what is counted afterwards is seen too
        if late > 1.0:
            print(f"{late:.3f} s late", flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
"""


def test_strangers_at_the_collector_forge_delay_and_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    count, seed = cases(3000, 60), random.randrange(1 << 30)
    monkeypatch.setattr(collect, "MOST_OPEN", min(count // 2, collect.MOST_OPEN))
    with Collector() as collector:
        name = collector.address.partition(":")[0]
        before = len(os.listdir("/proc/self/fd"))
        strangers = [
            subprocess.Popen(nobody_command(STRANGER, name, str(seed + i)), stdout=subprocess.PIPE)
            for i in range(3)
        ]
        try:
            for stranger in strangers:
                assert stranger.stdout is not None
                assert stranger.stdout.readline() == b"begun\n"
            done = subprocess.run(
                [sys.executable, "-c", HONEST, collector.address, str(count)],
                capture_output=True,
                text=True,
                check=True,
                timeout=90 if count < 1000 else 3600,
            )
            held = len(os.listdir("/proc/self/fd"))
            assert all(s.poll() is None for s in strangers), "they have to go on to the end"
        finally:
            for stranger in strangers:
                stranger.kill()
                stranger.communicate()
        collector.finish()
        found = collector.read()
        assert sorted(s.counters["bounce_pinned_bytes"] for s in found) == list(range(1, count + 1)), (
            f"seed {seed}"
        )
        assert collector.missed == 0
        assert done.stdout == "", f"seed {seed}"
        assert held - before <= collect.MOST_OPEN + collect.MOST_WAITING + 10


TARGET = """
import fcntl, os, random, sys
from nobounce.config import Settings
from nobounce.observe import export, layout
from nobounce.observe.counters import Counters
from nobounce.observe.layout import Header
drop()
chance = random.Random(int(sys.argv[1]))
good = Counters(Settings()).block()
for line in sys.stdin:
    export.stop()
    what = line.strip()
    fd = export._fd = os.memfd_create(export.NAME, os.MFD_ALLOW_SEALING)
    block = bytearray(good)
    if what == "mutated":
        for _ in range(chance.randrange(1, 20)):
            at = chance.choice([chance.randrange(64), chance.randrange(layout.WORDS)]) * 8
            block[at : at + 8] = chance.choice([chance.randbytes(8), bytes(8), b"\\xff" * 8, b"\\x01" + bytes(7)])
        block[Header.PID * 8 : Header.PID * 8 + 8] = os.getpid().to_bytes(8, "little")
    if what == "short":
        block = block[: chance.randrange(len(block))]
    if what != "empty":
        os.pwrite(fd, block, 0)
    if what != "unsealed":
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, export.SEALS)
    print("made", flush=True)
"""


def test_whatever_a_process_shows_attaching_ends_in_figures_or_in_an_error_of_ours() -> None:
    count, seed = cases(20_000, 200), random.randrange(1 << 30)
    chance, ends = random.Random(seed), Counter[str]()
    kinds = ["mutated"] * 6 + ["short", "empty", "unsealed", "honest"]
    before = len(os.listdir("/proc/self/fd"))
    with subprocess.Popen(
        nobody_command(TARGET, str(seed)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as target:
        assert target.stdin is not None
        assert target.stdout is not None
        for _ in range(count):
            what = chance.choice(kinds)
            target.stdin.write(f"{what}\n")
            target.stdin.flush()
            assert target.stdout.readline() == "made\n"
            begin, refused = time.monotonic(), ""
            try:
                with attach(target.pid) as reader:
                    found = reader.read()
                assert found.pids == (target.pid,)
                ends["figures"] += 1
            except NobounceError as e:
                ends[type(e).__name__] += 1
                refused = str(e)
            assert what != "honest" or not refused, (refused, seed)
            assert time.monotonic() - begin < 5, (what, seed)
        target.kill()
    assert ends["figures"] > count / 50, (ends, seed)
    assert len(ends) > 1, (ends, seed)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1
