"""C and C++: names by table, and nothing that only looks like one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nobounce.hipify.c import TABLE, convert_c
from nobounce.hipify.tokens import tokens
from scale import cases


def after(text: str) -> str:
    done = convert_c(text).text
    assert convert_c(done).text == done, "a second run changes something"
    return done


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("#include <cufile.h>\n", "#include <hipfile.h>\n"),
        ('#  include  "cuda_runtime.h" // cufile.h\n', '#  include  "hip/hip_runtime.h" // cufile.h\n'),
        ("cuFileRead(fh, p, n, 0, 0);", "hipFileRead(fh, p, n, 0, 0);"),
        ("CUfileError_t s = cuFileDriverOpen();", "hipFileError_t s = hipFileDriverOpen();"),
        ("if (s.err != CU_FILE_SUCCESS) f(s.cu_err);", "if (s.err != hipFileSuccess) f(s.hip_drv_err);"),
        ("enum CUfileOpError e; CUfileOpError g;", "enum hipFileOpError e; hipFileOpError_t g;"),
        ("#define C(x) do { cudaError_t e = (x); \\\n  if (e != cudaSuccess) die(); } while (0)\n",
         "#define C(x) do { hipError_t e = (x); \\\n  if (e != hipSuccess) die(); } while (0)\n"),
        ("k<<<g, b, 0, s>>>(p); ::cudaFree(p); return ::cudaFree(q);", "k<<<g, b, 0, s>>>(p); ::hipFree(p); return ::hipFree(q);"),
        ("cudaMallocHost(&p, f(a, b)); cudaMallocHost((void **)&p, n, 1);",
         "hipHostMalloc(&p, f(a, b), hipHostMallocDefault); hipHostMalloc((void **)&p, n, 1);"),
        ("std::vector<cudaStream_t> v; const cudaStream_t *t;", "std::vector<hipStream_t> v; const hipStream_t *t;"),
        ("struct cudaDeviceProp prop;", "struct hipDeviceProp_t prop;"),
        ("int n = 1'000; cudaFree(p); char c = '\"'; cudaFree(q);", "int n = 1'000; hipFree(p); char c = '\"'; hipFree(q);"),
    ],
)  # fmt: skip
def test_rewrites(old: str, new: str) -> None:
    assert after(old) == new


@pytest.mark.parametrize(
    "text",
    [
        "// cudaMalloc(p) \\\n cudaFree(p)\n",
        "/* cuFileRead \n cudaFree */",
        's = "cudaMalloc failed: \\"cudaFree\\"";',
        's = R"x(cudaMalloc )" cudaFree )x";',
        "x.cudaMalloc = 1; y->cudaFree(2); mine::cudaFree(3); T<int>::cudaFree(4);",
        "mycudaMalloc(cudaMallocX); err.cu_err = 1;",
        '#include "my/cufile.hpp"\n#include <vector>\n',
        "int x = cudaFreeze + cublasLike;",
        "cudaAPI::instance(); cuda_try(x); cuFileAPI(3); CUfileWrapper w; class CUFileThing t;",
        "",
        "'unfinished\n\"unfinished\n/* unfinished",
    ],
)
def test_what_only_looks_alike_stays(text: str) -> None:
    assert after(text) == text


@pytest.mark.parametrize(
    ("text", "name", "why"),
    [
        ("#include <cublas_v2.h>\n", "cublas_v2.h", "header"),
        ("cuMemAlloc(&p, 3);", "cuMemAlloc", "driver API"),
        ("cudaSomethingNew(3);", "cudaSomethingNew", "not in the table"),
        ("cuFileGetVersion(&v);", "cuFileGetVersion", "three"),
        ('dlsym(h, "cuFileRead");', "cuFileRead", "in a string"),
        ("cudaError_t cudaFree(void *p) { return 0; }\nvoid g() { cudaFree(q); }", "cudaFree", "defines this name itself"),
        ("int cudaFree(int);\nvoid g() { cudaFree(q); }", "cudaFree", "defines this name itself"),
        ("#define cudaFree free\nvoid g() { cudaFree(q); }", "cudaFree", "defines this name itself"),
    ],
)  # fmt: skip
def test_what_is_left_is_said(text: str, name: str, why: str) -> None:
    done = convert_c(text)
    assert [x.name for x in done.left] == [name]
    assert why in done.left[0].reason
    assert done.text == text.replace("cudaError_t", "hipError_t")


PIECES = st.sampled_from(
    [
        *list(TABLE)[::9],
        '"',
        "'",
        'R"(',
        ')"',
        "//",
        "/*",
        "*/",
        "\\\n",
        "\n",
        "#include",
        "<cufile.h>",
        "1'0",
        "::",
        "é",
        " ",
    ]
)


@settings(max_examples=cases(2000, 50))
@given(st.lists(PIECES | st.text(max_size=3), max_size=20))
def test_every_character_belongs_to_one_token_and_a_second_run_changes_nothing(pieces: list[str]) -> None:
    text = "".join(pieces)
    assert "".join(t.text for t in tokens(text)) == text
    done = convert_c(text)
    assert convert_c(done.text).text == done.text
