"""What checks without numpy and torch: their types are unknown then, and everything else is as it was."""

from __future__ import annotations

from typing import assert_type

import nobounce

assert_type(nobounce.load("m"), nobounce.Model[nobounce.Tensor])
nobounce.load("m", framework="torch")["w"].anything()
nobounce.load("m", framework="numpy")["w"].anything()
nobounce.load("m")["w"].torch().anything()
file = nobounce.open("f")
assert_type(file.read(bytearray(8)), nobounce.Receipt)
file.read_many(bytearray(8), file_offsets=[0, 4], nbytes=4)

nobounce.load("m", framework="jax")  # wrong
nobounce.load("m")["w"].anything()  # wrong
file.read(8)  # wrong
file.read_async(bytearray(8), stream="null")  # wrong
