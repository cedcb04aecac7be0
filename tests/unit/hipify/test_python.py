"""Snippets before and after; what is left and why; what never changes."""

from __future__ import annotations

import textwrap

import pytest

from nobounce.hipify.convert import Source, convert
from nobounce.hipify.report import Target

STREAM = "stream=nobounce.LEGACY_DEFAULT_STREAM"


def converted(text: str, target: Target = "nobounce") -> Source:
    return convert(textwrap.dedent(text).encode(), "python", target)


def after(text: str, target: Target = "nobounce") -> str:
    source = converted(text, target)
    again = convert(source.data, "python", target)
    assert again.data == source.data, "a second run changes something"
    compile(source.data, "after", "exec")
    return source.data.decode()


def reasons(text: str, target: Target = "nobounce") -> dict[int, str]:
    source = converted(text, target)
    assert not source.changed, source.data.decode()
    found: dict[int, str] = {}
    for x in source.converted.left:
        found[x.line] = f"{found.get(x.line, '')} {x.reason}"
    return found


CASES = {
    "an alias of the module": (
        "import kvikio as kv\nwith kv.CuFile(p) as f:\n    f.read(a)\n",
        "import nobounce\nwith nobounce.open(p) as f:\n    f.read(a)\n",
    ),
    "an alias of the class": (
        "from kvikio import CuFile as CF, defaults\nf = CF(p, 'w')\nf.write(a)\ndefaults.set('x', 1)\n",
        "import nobounce\nfrom kvikio import defaults\nf = nobounce.open(p, 'w')\nf.write(a)\ndefaults.set('x', 1)\n",
    ),
    "counts that are used, comments and odd blanks": (
        "import kvikio  # why\nf = kvikio.CuFile( p )\nn = f.read( a ,  # the array\n    4,  file_offset = 8 , )  # end\nprint(f.raw_write(a, 1, 2, 3))\n",
        "import nobounce  # why\nf = nobounce.open( p )\nn = f.read( a ,  # the array\n    nbytes=4,  file_offset = 8 , ).nbytes  # end\nprint(f.write(a, nbytes=1, file_offset=2, buffer_offset=3).nbytes)\n",
    ),
    "task_size goes": (
        "import kvikio\nf = kvikio.CuFile(p)\nf.read(a, None, 0, 1 << 20)\nf.read(a, task_size=4096, size=3)\n",
        "import nobounce\nf = nobounce.open(p)\nf.read(a, nbytes=None, file_offset=0)\nf.read(a, nbytes=3)\n",
    ),
    "a future that is waited for at once": (
        "import kvikio\nf = kvikio.CuFile(p)\nx = f.pread(a).get()\nf.pwrite(a, 5).get()\n",
        "import nobounce\nf = nobounce.open(p)\nx = f.read(a).nbytes\nf.write(a, nbytes=5)\n",
    ),
    "futures in a list": (
        "import kvikio\nf = kvikio.CuFile(p)\nall = [f.pread(a, file_offset=i) for i, a in enumerate(x)]\ns = sum(t.get() for t in all)\nall[0].done()\n",
        f"import nobounce\nf = nobounce.open(p)\nall = [f.read_async(a, file_offset=i, {STREAM}) for i, a in enumerate(x)]\ns = sum(t.result().nbytes for t in all)\nall[0].done()\n",
    ),
    "a stream of the caller's": (
        "import kvikio\nf = kvikio.CuFile(p)\nt = f.raw_read_async(a, s.ptr, 8, dev_offset=2)\nn = t.check_bytes_done()\n",
        "import nobounce\nf = nobounce.open(p)\nt = f.read_async(a, stream=s.ptr, nbytes=8, buffer_offset=2)\nn = t.result().nbytes\n",
    ),
    "an import that may fail": (
        "try:\n    import kvikio\nexcept ImportError:\n    kvikio = None\n\ndef f(p, a):\n    if kvikio is None:\n        raise OSError\n    with kvikio.CuFile(p) as f:\n        return f.read(a)\n",
        "try:\n    import nobounce\nexcept ImportError:\n    nobounce = None\n\ndef f(p, a):\n    if nobounce is None:\n        raise OSError\n    with nobounce.open(p) as f:\n        return f.read(a).nbytes\n",
    ),
    "an import on one line": (
        "def f(p):\n    import kvikio; return kvikio.CuFile(p).closed\n",
        "def f(p):\n    import nobounce; return nobounce.open(p).closed\n",
    ),
    "one of two imports stays": (
        "import os, kvikio\nf = kvikio.CuFile(p)\nkvikio.RemoteFile(u)\n",
        "import nobounce\nimport os, kvikio\nf = nobounce.open(p)\nkvikio.RemoteFile(u)\n",
    ),
    "annotations and isinstance": (
        "from kvikio import CuFile\n\ndef load(f: CuFile | None, a) -> None:\n    if isinstance(f, CuFile):\n        f.read(a)\n",
        "import nobounce\n\ndef load(f: nobounce.File | None, a) -> None:\n    if isinstance(f, nobounce.File):\n        f.read(a)\n",
    ),
    "the same name for a file of Python's": (
        "import kvikio\nwith open(p) as f:\n    f.read()\nwith kvikio.CuFile(p) as f:\n    f.read(a)\n",
        "import nobounce\nwith open(p) as f:\n    f.read()\nwith nobounce.open(p) as f:\n    f.read(a)\n",
    ),
    "a method of another object by the same name": (
        "import kvikio\nf = kvikio.CuFile(p)\nf.pread(a).get()\nqueue.get()\nother.pread(a, 1)\n",
        "import nobounce\nf = nobounce.open(p)\nf.read(a)\nqueue.get()\nother.pread(a, 1)\n",
    ),
    "a docstring and __future__ first": (
        '"""text"""\nfrom __future__ import annotations\n\ndef f(p):\n    from kvikio import CuFile\n    return CuFile(p)\n\ndef g(p, a):\n    t = f(p).pread(a)\n    return t.get()\n',
        f'"""text"""\nfrom __future__ import annotations\n\nimport nobounce\ndef f(p):\n    import nobounce\n    return nobounce.open(p)\n\ndef g(p, a):\n    t = f(p).read_async(a, {STREAM})\n    return t.result().nbytes\n',
    ),
    "the runtime by its older name": (
        "from cuda import cudart\nerr, p = cudart.cudaMalloc(8)\nassert err == cudart.cudaError_t.cudaSuccess\ncudart.cudaFree(p)\n",
        "from nobounce import hip\nerr, p = hip.hipMalloc(8)\nassert err == hip.hipError_t.hipSuccess\nhip.hipFree(p)\n",
    ),
    "the runtime by either name": (
        "try:\n    from cuda.bindings import runtime as rt\nexcept ImportError:\n    from cuda import cudart as rt\nrt.cudaMallocHost(8)\n",
        "try:\n    from nobounce import hip\nexcept ImportError:\n    from nobounce import hip\nhip.hipHostMalloc(8, 0)\n",
    ),
    "the runtime by its whole name": (
        "import cuda.bindings.runtime\nimport cuda.bindings.driver\ncuda.bindings.runtime.cudaDeviceSynchronize()\ncuda.bindings.driver.cuInit(0)\n",
        "from nobounce import hip\nimport cuda.bindings.driver\nhip.hipDeviceSynchronize()\ncuda.bindings.driver.cuInit(0)\n",
    ),
    "numbers behind addresses": (
        "import ctypes\nfrom cuda.bindings import cufile\ncufile.read_async(h, p, ctypes.addressof(n), ctypes.addressof(o), ctypes.addressof(b), ctypes.addressof(d), s)\n",
        "import ctypes\nfrom nobounce import hipfile\nhipfile.check(hipfile.read_async(h, p, n, o, b, d, s))\n",
    ),
    "two classes of errors": (
        "from cuda.bindings import cufile\ntry:\n    cufile.driver_open()\nexcept (KeyError, cufile.cuFileError):\n    pass\n",
        "from nobounce import hipfile\ntry:\n    hipfile.check(hipfile.driver_open())\nexcept (KeyError, hipfile.HipFileException, OSError):\n    pass\n",
    ),
    "flags of torch's files": (
        "import os, torch\nf = torch.cuda.gds.GdsFile(p, os.O_RDONLY)\nf.load_storage(s, 4)\nos.fsync(f.fd)\n",
        'import nobounce\nimport os, torch\nf = nobounce.open(p, "r")\nf.read(torch.empty(0, dtype=torch.uint8, device=s.device).set_(s), file_offset=4)\nos.fsync(f.fileno())\n',
    ),
    "a block of nothing but registrations": (
        "import kvikio\ntry:\n    kvikio.memory_register(a)\n    kvikio.memory_register(b)\nfinally:\n    kvikio.CuFile(p).close()\n",
        "import nobounce\ntry:\n    pass\nfinally:\n    nobounce.open(p).close()\n",
    ),
    "several files of one with": (
        "import kvikio\nwith kvikio.CuFile(p) as f, kvikio.CuFile(q, 'w') as g:\n    g.write(x, f.read(x))\n",
        "import nobounce\nwith nobounce.open(p) as f, nobounce.open(q, 'w') as g:\n    g.write(x, nbytes=f.read(x).nbytes)\n",
    ),
    "an attribute that a property gives": (
        "import kvikio\n\nclass A:\n    def __init__(self, p):\n        self._f = None\n        self._f = kvikio.CuFile(p)\n    @property\n    def file(self):\n        return self._f\n    def get(self, b):\n        return self.file.pread(b).get()\n",
        "import nobounce\n\nclass A:\n    def __init__(self, p):\n        self._f = None\n        self._f = nobounce.open(p)\n    @property\n    def file(self):\n        return self._f\n    def get(self, b):\n        return self.file.read(b).nbytes\n",
    ),
    "registrations go with the files": (
        "import kvikio\nkvikio.memory_register(a)\nf = kvikio.CuFile(p)\nif x:\n    kvikio.memory_deregister(a)\n",
        "import nobounce\nf = nobounce.open(p)\nif x:\n    pass\n",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_rewrites(name: str) -> None:
    old, new = CASES[name]
    assert after(old) == new


def test_tabs_and_crlf_stay() -> None:
    text = "import kvikio\r\ndef f(p, a):\r\n\twith kvikio.CuFile(p) as g:\r\n\t\treturn g.read(a)\r\nkvikio.Mmap(p)\r\n"
    done = convert(text.encode(), "python", "nobounce").data.decode()
    assert done == (
        "import nobounce\r\nimport kvikio\r\ndef f(p, a):\r\n\twith nobounce.open(p) as g:\r\n"
        "\t\treturn g.read(a).nbytes\r\nkvikio.Mmap(p)\r\n"
    )


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("from kvikio import *\nf = CuFile(p)\n", 1, "names that come by *"),
        ("import kvikio\nkvikio = other\nkvikio.CuFile(p)\n", 3, "bound to something else in line 2"),
        ("import kvikio\nf = kvikio.CuFile(p)\nf = 3\n", 3, "bound to something else as well"),
        ("import kvikio\nf = kvikio.CuFile(p)\nhelp(f)\n", 3, "handed to help()"),
        ("import kvikio\nf = kvikio.CuFile(p)\nf.open_flags()\n", 3, "no `open_flags`"),
        ("import kvikio\nf = kvikio.CuFile(p, 'a')\n", 2, "no mode for appending"),
        ("import kvikio\nt = kvikio.CuFile(p).pread(a)\nwait([t])\n", 3, "handed to wait()"),
        ("import kvikio\nf = kvikio.CuFile(p)\npool.submit(f.read, a)\n", 3, "handed on, not called"),
        ("import kvikio\nf = kvikio.CuFile(p)\nf.read(*a)\n", 3, "its arguments are not"),
        ("import kvikio\nclass A(kvikio.CuFile):\n    pass\n", 2, "cannot be followed"),
        ("import kvikio\ndef f(g):\n    g.h = kvikio.CuFile(p)\n", 3, "an attribute of another object"),
        ("import kvikio\nkvikio.defaults.num_threads_reset(4)\n", 2, "NOBOUNCE_IO_THREADS"),
        ("import kvikio\nf = lambda p: kvikio.CuFile(p)\n", 2, "value of a lambda"),
        ("import kvikio\nmatch kvikio.CuFile(p):\n    case f:\n        f.read(a, 1)\n", 2, "match statement"),
        ("import kvikio\nf = kvikio.CuFile(p)\nq.append(f.pread(a))\n", 3, "handed to q.append()"),
        ("import kvikio\nt = [kvikio.CuFile(p).pread(a)]\nwait_all(t)\n", 3, "`t` is handed to wait_all()"),
        (
            "import kvikio\nasync def f():\n    await kvikio.CuFile(p).pread(a)\n",
            3,
            "gets into an expression",
        ),
        (
            "import kvikio\nx = kvikio.CuFile(p)\nx = x.pread(a)\n",
            2,
            "holds a kvikio.CuFile and a kvikio.IOFuture",
        ),
        ("import kvikio\nuse(kvikio)\n", 2, "the module itself is used"),
        ("import importlib\nk = importlib.import_module('kvikio')\n", 2, "named in a string"),
        ("import kvikio\nnobounce = 3\nkvikio.CuFile(p)\n", 3, "`nobounce` means something else"),
        (
            "from cuda.bindings import runtime as rt\nrt.cudaMalloc(1)\nrt.cudaGraphCreate(0)\n",
            3,
            "--to hip has",
        ),
        ("from cuda.bindings import runtime as rt\nrt.cudaMalloc(size=1)\n", 2, "by position"),
        ("from cuda.bindings import runtime as rt\nrt.cudaFree(s.getPtr())\n", 2, "getPtr()"),
        ("from cuda.bindings import driver\ndriver.cuInit(0)\n", 2, "driver API"),
        (
            "from cuda.bindings import cufile\ncufile.driver_open()\ncufile.batch_io_set_up(3)\n",
            3,
            "C structures",
        ),
        ("from cuda.bindings import cufile\ncufile.handle_register(x)\n", 2, "no cufile.Descr()"),
        ("from cufile import CuFile\nf = CuFile(p, mode)\n", 2, "no literal"),
        ("import torch\nf = torch.cuda.gds.GdsFile(name(), x)\n", 2, "put it into a variable"),
    ],
)
def test_what_cannot_keep_its_meaning_is_left_and_said(text: str, line: int, why: str) -> None:
    found = reasons(text)
    assert why in found[line], found


@pytest.mark.parametrize(
    "text",
    [
        "x = 1\n",
        "from .kvikio import CuFile\nf = CuFile(p)\nf.read(a, 1)\n",
        "import mykvikio\nmykvikio.CuFile(p).pread(a).get()\n",
        "class kvikio:\n    CuFile = open\nf = kvikio.CuFile(p)\n",
        "# kvikio.CuFile\nx = 'import kvikio'\n",
        "def f(kvikio):\n    return kvikio.CuFile(p).read(a)\n",
        "import cudart\ncudart.cudaMalloc(3)\n",
        "\ufeff# cufile\n".removeprefix("\ufeff"),
    ],
)
def test_names_that_only_look_alike_stay_and_are_not_reported(text: str) -> None:
    assert reasons(text) == {}


def test_hip_has_no_counterpart_of_kvikio() -> None:
    assert "--to nobounce has" in reasons("import kvikio\nf = kvikio.CuFile(p)\n", "hip")[2]
    assert "hipFile already" in reasons("import torch\ntorch.cuda.gds.GdsFile(p, 0)\n", "hip")[2]


def test_with_hip_memory_and_files_go_over_together_or_not_at_all() -> None:
    text = "from cuda.bindings import cufile, runtime\np = runtime.cudaMalloc(8)\ncufile.batch_io_set_up(3)\n"
    assert "memory is of one runtime" in reasons(text, "hip")[2]
    whole = after(
        "from cuda.bindings import cufile, runtime\nruntime.cudaGraphCreate(0)\ncufile.driver_open()\n", "hip"
    )
    assert "from hip import hip\nfrom hip import hipfile\n" in whole
    assert "hip.hipGraphCreate(0)\n_hipfile_value(hipfile.hipFileDriverOpen())\n" in whole


def test_a_file_handed_out_is_rewritten_and_pointed_at() -> None:
    done = converted("import kvikio\ndef opened(p):\n    return kvikio.CuFile(p)\n")
    assert done.changed
    assert [(n.line, n.text) for n in done.converted.notes] == [
        (3, "opened() hands out a nobounce.File: look at its callers elsewhere")
    ]
