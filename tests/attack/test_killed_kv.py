"""kill -9 of a writer of a BlockStore at random moments: what was acknowledged is there, and no block is another's."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from capabilities import need
from nobounce.kv import BlockStore
from scale import cases

ROW, CAPACITY, KEYS, COUNT = 8192, 16, 24, 4
FORKED = """
import os, random, signal, sys, time
import numpy as np, xxhash
import nobounce
import nobounce.kv
import nobounce.io.batch.uring

def work(seed):
    rows = [np.zeros((4, 8192), np.uint8) for _ in range(2)]
    layout = [(r, 8192) for r in rows]
    generator = random.Random(seed)
    stream = nobounce.Device("cpu").create_stream() if how == "stream" else None
    with nobounce.kv.BlockStore(path, layout=layout, capacity=16, checksums=how == "checksums") as store:
        os.write(ready[1], b".")
        while True:
            keys = generator.sample(range(24), 4)
            values = [generator.randrange(1, 256) for _ in keys]
            for r in rows:
                r[:] = np.array(values, np.uint8)[:, None]
                r[:, :8] = np.array(keys, np.int64).view(np.uint8).reshape(4, 8)
            text = " ".join(f"{k}={v}" for k, v in zip(keys, values))
            os.write(1, f"try {text}\\n".encode())
            done = store.put(keys, range(4), stream=stream)
            if stream is not None:
                done.result()
            os.write(1, f"ack {text}\\n".encode())

path, how = sys.argv[1:]
for line in sys.stdin:
    seed, seconds = line.split()
    ready = os.pipe()
    pid = os.fork()
    if not pid:
        work(int(seed))
    os.close(ready[1])
    if int(seed) % 4:
        os.read(ready[0], 1)
    os.close(ready[0])
    time.sleep(float(seconds))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.write(1, b"killed\\n")
"""


@pytest.mark.parametrize("how", ["plain", "checksums", "stream"])
def test_what_was_acknowledged_is_there_and_no_block_is_another_s(tmp_path: Path, how: str) -> None:
    need("xxhash")
    path = tmp_path / "s"
    generator = random.Random(9)
    rows = [np.zeros((KEYS, ROW), np.uint8) for _ in range(2)]
    layout = [(r, ROW) for r in rows]
    BlockStore(path, layout=layout, capacity=CAPACITY, checksums=how == "checksums").close()
    held: dict[int, int] = {}
    command = [sys.executable, "-c", FORKED, str(path), how]
    acknowledged = 0
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        for number in range(cases(200, 4)):
            parent.stdin.write(f"{number} {generator.uniform(0, 0.15)}\n")
            parent.stdin.flush()
            tried: dict[int, int] = {}
            while (line := parent.stdout.readline().split())[0] != "killed":
                values = dict(tuple(map(int, word.split("="))) for word in line[1:])
                if line[0] == "try":
                    tried = values
                else:
                    held, tried = {k: v for k, v in held.items() if k not in values} | values, {}
                    acknowledged += 1
            with BlockStore(path, layout=layout, capacity=CAPACITY, checksums=how == "checksums") as store:
                found = store.get(range(KEYS), range(KEYS)).check().found.tolist()
                assert len(store) <= CAPACITY
            # Room for a put comes from the least recently used: COUNT of the slots, and COUNT more where blocks are of one age.
            newest = list(held)[-(CAPACITY - 2 * COUNT) :]
            for key, there in enumerate(found):
                allowed = {d[key] for d in (held, tried) if key in d}
                if there:
                    for tensor in rows:
                        assert tensor[key, :8].tobytes() == key.to_bytes(8, "little"), (number, key)
                        assert set(tensor[key, 8:].tolist()) <= allowed
                        assert (tensor[key, 8] == tensor[key, 8:]).all()
                else:
                    assert key not in newest, (number, key)
            held = {k: int(rows[0][k, 8]) for k in [*held, *(t for t in tried if t not in held)] if found[k]}
        parent.stdin.close()
    assert acknowledged
