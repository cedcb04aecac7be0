"""Every exception class, and what transfers hand back, survives pickle, copy and deepcopy with all its fields."""

from __future__ import annotations

import copy
import errno
import importlib
import multiprocessing
import pickle
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import nobounce
from capabilities import need
from nobounce import errors
from nobounce.errors import NobounceError, RuntimeStatus, TransferError
from nobounce.hipfile import HipFileException
from nobounce.route.types import Refusal

WAYS: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
    "oldest pickle": lambda thing: pickle.loads(pickle.dumps(thing, 0)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}
RECEIPT = nobounce.Receipt("read", "/data/f", "cpu", 10, 4)
REFUSALS = (Refusal("no-direct-io-on-device", "no", "do"),)
SYSTEM: dict[type[NobounceError], Callable[[type[Any]], NobounceError]] = {
    errors.FormatError: lambda kind: kind("bad", filename="/data/f", tensor="w", offset=8),
    errors.RouteError: lambda kind: kind("no way", REFUSALS, filename="/data/f"),
    errors._SystemError: lambda kind: kind("gone", errno.ENOENT, "/data/f"),
    errors.TransferError: lambda kind: kind(
        errno.EIO,
        filename="/data/f",
        file_offset=4096,
        nbytes=10,
        backend="fastpath",
        call="pread",
        cure="Try again",
        receipt=RECEIPT,
    ),
    HipFileException: lambda kind: kind(5011, 3),
    errors.DeviceError: lambda kind: kind(
        "copy", RuntimeStatus.LaunchFailure, detail="x", code=719, name="n"
    ),
}
"""How to make the classes that are not made from a message alone, and their subclasses."""


def tree(root: type[NobounceError] = NobounceError) -> Iterator[type[NobounceError]]:
    yield root
    for kind in root.__subclasses__():
        if kind.__module__.startswith("nobounce"):
            yield from tree(kind)


def everything() -> list[type[NobounceError]]:
    for module in pkgutil.walk_packages(nobounce.__path__, "nobounce."):
        if not module.name.startswith(("nobounce.cli", "nobounce.testing", "nobounce.__main__")):
            importlib.import_module(module.name)
    return sorted(set(tree()), key=lambda kind: (kind.__module__, kind.__qualname__))


def made(kind: type[NobounceError]) -> NobounceError:
    make = next((SYSTEM[k] for k in kind.__mro__ if k in SYSTEM), lambda kind: kind("it failed"))
    error = make(kind)
    error.add_note("request 3")
    error.__cause__ = TransferError(
        errno.EIO, filename="/data/g", file_offset=0, nbytes=1, backend="fallback", call="pread"
    )
    return error


def fields(error: BaseException) -> dict[str, Any]:
    named = ("errno", "strerror", "filename", "name", "path", "msg")
    return {name: getattr(error, name, None) for name in named} | vars(error)


@pytest.mark.parametrize("way", WAYS)
def test_every_class_of_the_tree(way: str) -> None:
    kinds = everything()
    assert len(kinds) > 20
    for kind in kinds:
        error = made(kind)
        back = WAYS[way](error)
        assert type(back) is kind
        assert (str(back), repr(back), back.args) == (str(error), repr(error), error.args), kind
        assert {k: repr(v) for k, v in fields(back).items()} == {k: repr(v) for k, v in fields(error).items()}
        assert str(back.__cause__) == str(error.__cause__)


def test_a_cause_that_is_no_error_of_ours_does_not_stop_it() -> None:
    error = made(errors.TransferError)
    error.__cause__ = OSError("held by", lambda: None)
    assert pickle.loads(pickle.dumps(error)).__cause__ is None


def fails(path: str) -> None:
    with nobounce.open(path) as f, nobounce.Device("cpu").allocate(100) as buf:
        f.read(buf, file_offset=1, require="fastpath")


def test_a_pool_of_processes_hands_the_error_over(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(8192))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        waiting = pool.apply_async(fails, (str(path),))
        with pytest.raises(nobounce.RouteError) as caught:
            waiting.get(60)
    assert caught.value.refusals
    assert caught.value.filename == str(path)


@pytest.mark.parametrize("way", WAYS)
def test_receipts_routes_statistics_and_results_of_a_batch(way: str, tmp_path: Path) -> None:
    need("numpy")
    import numpy as np

    path = tmp_path / "f"
    path.write_bytes(bytes(16384))
    with nobounce.open(path) as f, nobounce.Device("sim:0").allocate(16384) as buf:
        receipt, route = f.read(buf), f.explain(buf)
        with nobounce.Batch() as batch:
            batch.read(f, buf, file_offsets=[0, 1 << 40, -5], nbytes=4096, buffer_offsets=0, cache="avoid")
            result = batch.wait()
    for thing in (receipt, route, nobounce.stats(), nobounce.Device("cpu"), batch.receipt):
        back = WAYS[way](thing)
        assert back == thing
        assert repr(back) == repr(thing)
    back = WAYS[way](result)
    assert np.array_equal(back.ids, result.ids)
    assert np.array_equal(back.nbytes, result.nbytes)
    assert back.statuses == result.statuses
    assert "invalid" in back.statuses
    assert {k: str(e) for k, e in back.errors.items()} == {k: str(e) for k, e in result.errors.items()}
