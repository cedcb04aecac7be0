"""What `nobounce.load` gives, as type checkers see it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, assert_type

import numpy as np
import torch

import nobounce

assert_type(nobounce.load("m.safetensors"), nobounce.Model[nobounce.Tensor])
assert_type(nobounce.load(Path("m"), framework=None), nobounce.Model[nobounce.Tensor])
assert_type(nobounce.load(["a", Path("b")], framework="numpy"), nobounce.Model[np.ndarray[Any, Any]])
assert_type(nobounce.load("m", device="cuda:0", framework="torch"), nobounce.Model[torch.Tensor])
nobounce.load("m", device=0)
nobounce.load("m", device=nobounce.Device("cpu"))
nobounce.load("m", device=torch.device("cuda", 1))
nobounce.load("m", require="fastpath", cache="avoid", align=256, progress=lambda backend, nbytes: None)
nobounce.load("m", framework="torch", shared_storage=True)
assert_type(nobounce.load("m", names="layers.0.*", framework="torch"), nobounce.Model[torch.Tensor])
nobounce.load("m", device="cuda:0", pinned=True)
nobounce.load("m", names=["a", "b"], slices={"a": ((0, 5), None)})
nobounce.load("m", names=lambda name: name.startswith("a"))
nobounce.load("m", into={"a": torch.zeros(3), "b": np.zeros(3)}, strict=True)
nobounce.load("m", into=torch.nn.Linear(2, 2))

with nobounce.open_model("m") as opened:
    assert_type(opened.load(), nobounce.Model[nobounce.Tensor])
    assert_type(opened.load(framework="numpy", names="x"), nobounce.Model[np.ndarray[Any, Any]])
    opened.load(into={"a": torch.zeros(3)})
    assert_type(opened.info("a"), nobounce.StoredTensor)
    assert_type(list(opened.keys()), list[str])

model = nobounce.load("m.gguf", framework="torch")
assert_type(model["w"], torch.Tensor)
assert_type(model.receipt, nobounce.Receipt)
assert_type(model.receipts, tuple[nobounce.Receipt, ...])
assert_type(model.device, nobounce.Device)
assert_type(model.metadata, dict[str, str])
state: dict[str, torch.Tensor] = model
for name, tensor in model.items():
    assert_type(name, str)
    assert_type(tensor, torch.Tensor)


def either(framework: Literal["numpy", "torch"]) -> np.ndarray[Any, Any] | torch.Tensor:
    return nobounce.load("m", framework=framework)["w"]


def any_of_three(
    framework: Literal["numpy", "torch"] | None,
) -> nobounce.Tensor | np.ndarray[Any, Any] | torch.Tensor:
    return nobounce.load("m", framework=framework)["w"]


tensor_here = nobounce.load("m")["w"]
assert_type(tensor_here.torch(), torch.Tensor)
assert_type(tensor_here.numpy(), np.ndarray[Any, Any])
assert_type(tensor_here.shape, tuple[int, ...])
assert_type(nobounce.Tensor.from_dlpack(torch.empty(4)), nobounce.Tensor)
assert_type(nobounce.Tensor.from_dlpack(np.empty(4)), nobounce.Tensor)
nobounce.dequantize(tensor_here, "Q8_0")
nobounce.dequantize(model["w"], "Q8_0")

# Saving
assert_type(nobounce.save({"w": torch.empty(4), "x": np.empty(4)}, "m.safetensors"), nobounce.Receipt)
nobounce.save(model, Path("m"), metadata={"format": "pt"}, fsync=False)
nobounce.save(nobounce.load("m"), "m", progress=lambda backend, nbytes: None)
nobounce.save({"raw": b"bytes"}, "m")

nobounce.save([torch.empty(4)], "m")  # wrong
nobounce.save({"w": [1, 2]}, "m")  # wrong
nobounce.save({"w": torch.empty(4)}, "m", metadata={"epoch": 1})  # wrong

nobounce.load("m", framework="jax")  # wrong
nobounce.load("m", framework="numpy", shared_storage=True)  # wrong
nobounce.load("m", device=1.5)  # wrong
nobounce.load("m", cache="always")  # wrong
nobounce.load("m", require="direct")  # wrong
nobounce.load(7)  # wrong
nobounce.load("m", framework="numpy")["w"].numpy()  # wrong
nobounce.load("m")["w"].reshape(4)  # wrong
nobounce.lode("m")  # wrong
