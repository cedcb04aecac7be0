"""C and C++ sources, CUDA's .cu among them: names and includes by table, whatever stands around them stays.

Only names that mean the libraries' own things are changed: not members (`x.cudaFree`), not names of a
namespace (`mine::cudaFree`), and not names that the source itself defines.
"""

from __future__ import annotations

import re

from nobounce.hipify import cufile_c, names
from nobounce.hipify.edits import Edit, Lines, apply
from nobounce.hipify.report import Converted, Left
from nobounce.hipify.tokens import Token, tokens

_RUNTIME = {
    **names.CALLS,
    **names.TYPES,
    **names.ERRORS,
    **names.KINDS,
    **names.CONSTANTS,
    **names.C_ONLY,
}
TABLE: dict[str, tuple[str, str]] = {
    **{old: ("runtime", new) for old, new in _RUNTIME.items()},
    **{
        old: ("cuFile", new)
        for t in (cufile_c.CALLS, cufile_c.TYPES, cufile_c.CONSTANTS)
        for old, new in t.items()
    },
}
"""Each name with its library and what it becomes."""
_KEYWORDS = frozenset(
    [
        "return",
        "else",
        "do",
        "case",
        "goto",
        "throw",
        "new",
        "delete",
        "co_return",
        "co_yield",
        "const",
        "volatile",
        "static",
        "extern",
        "inline",
        "constexpr",
        "typename",
        "struct",
        "class",
        "enum",
        "union",
        "operator",
        "sizeof",
        "define",
        "ifdef",
        "ifndef",
        "defined",
        "undef",
        "if",
        "elif",
        "register",
        "mutable",
        "friend",
        "virtual",
        "explicit",
    ]
)
"""Words before a name that are no type of it."""
INCLUDES = {
    "cufile.h": "hipfile.h",
    "cuda_runtime.h": "hip/hip_runtime.h",
    "cuda_runtime_api.h": "hip/hip_runtime_api.h",
    "cuda_fp16.h": "hip/hip_fp16.h",
    "driver_types.h": "hip/driver_types.h",
    "vector_types.h": "hip/hip_vector_types.h",
    "cuda.h": "hip/hip_runtime.h",
}
_LOOKS = re.compile(
    r"cuda[A-Z][a-z]\w*|cuFile[A-Z][a-z]\w*|C[Uu]file\w+_t|CUFile\w+_t|CU_FILE_[A-Z]\w*|CUFILE_[A-Z]\w*|cu(?!File)[A-Z][a-z]\w*"
    r"|CU(?:stream|event|device|context|function|module|result|deviceptr)|CUDA_SUCCESS|CUDA_ERROR_\w+"
)
"""The style of the names of CUDA and cuFile; `cudaAPI` and `cuda_try` are programs' own."""
_HEADERS = re.compile(
    r"(?:cuda|cufile|nvml|nvToolsExt|nccl|cu(?:blas|fft|rand|sparse|solver|dnn|tensor))[^/]*$|(?:cuda|cub|thrust|nvtx3|cooperative_groups)/|cooperative_groups\.h$",
    re.IGNORECASE,
)
"""Headers of NVIDIA's, by name or folder."""
_DRIVER = re.compile(r"cu[A-Z]|CU[a-z]|CUDA_")
_LIBRARIES = re.compile(r"cu(?:blas|fft|rand|sparse|solver|dnn|tensor)", re.IGNORECASE)


def convert_c(text: str) -> Converted:
    """Rewrite a source."""
    return _Source(text).run()


class _Source:
    def __init__(self, text: str) -> None:
        self._text, self._lines = text, Lines(text)
        self._tokens = list(tokens(text))
        self._solid = [t for t in self._tokens if t.kind not in ("blank", "comment")]
        self._own = self._defined()
        self._out = Converted(text)
        self._edits: list[Edit] = []

    def run(self) -> Converted:
        cufile = any(
            t.kind == "name" and t.text in TABLE and TABLE[t.text][0] == "cuFile" for t in self._solid
        )
        bare = {t.text for i, t in enumerate(self._solid) if t.kind == "name" and not self._is_member(i)}
        for i, token in enumerate(self._solid):
            match token.kind:
                case "include":
                    self._include(token)
                case "name":
                    if self._is_member(i):
                        if cufile and token.text in cufile_c.MEMBERS and token.text not in bare:
                            self._change(token, cufile_c.MEMBERS[token.text], f"cuFile.{token.text}")
                    else:
                        self._name(i, token)
                case "string":
                    self._string(token)
        self._out.text = apply(self._text, self._edits)
        self._out.left = sorted(set(self._out.left))
        return self._out

    def _before(self, i: int, n: int = 1) -> str:
        return self._solid[i - n].text if i >= n else ""

    def _after(self, i: int) -> str:
        return self._solid[i + 1].text if i + 1 < len(self._solid) else ""

    def _is_member(self, i: int) -> bool:
        """Behind `.`, `->`, or the `::` of a namespace or class."""
        before = self._before(i)
        if before in (".", "->"):
            return True
        if before != "::" or i < 2:
            return False
        owner = self._solid[i - 2]
        return owner.text == ">" or (owner.kind == "name" and owner.text not in _KEYWORDS)

    def _defined(self) -> dict[str, int]:
        """Names of the table that the source gives a meaning of its own, with the token: macros,
        functions, types, variables."""
        found: dict[str, int] = {}
        for i, token in enumerate(self._solid):
            if token.kind == "name" and token.text in TABLE and not self._is_member(i) and self._is_own(i):
                found.setdefault(token.text, i)
        return found

    def _is_own(self, i: int) -> bool:
        before, after = self._before(i), self._after(i)
        if before in ("define", "undef"):
            return self._before(i, 2) == "#"
        if before in ("struct", "class", "enum", "union", "namespace"):
            return after in ("{", ":")
        if before == "using":
            return after == "="
        if i == 0 or not self._is_type_end(i - 1):
            return False
        if after == "(":
            return self._has_body(i + 1, prototypes=self._solid[i - 1].kind == "name")
        return self._solid[i - 1].kind == "name" and after in (";", "=", ",", "[")

    def _is_type_end(self, i: int) -> bool:
        """Whether a token may end the type before a name that is declared."""
        token = self._solid[i]
        return token.text not in _KEYWORDS if token.kind == "name" else token.text in ("*", "&", ">")

    def _closing(self, i: int) -> int:
        """The token that closes the parenthesis which opens at i; the last one if none does."""
        depth = 0
        for j in range(i, len(self._solid)):
            if self._solid[j].kind == "mark":
                depth += {"(": 1, ")": -1}.get(self._solid[j].text, 0)
            if depth == 0:
                return j
        return len(self._solid) - 1

    def _has_body(self, i: int, *, prototypes: bool) -> bool:
        """Whether the parentheses that open here are followed by a function's body, or with
        `prototypes` by its end."""
        rest = self._closing(i) + 1
        while rest < len(self._solid) and self._solid[rest].text in ("const", "noexcept", "override"):
            rest += 1
        return rest < len(self._solid) and self._solid[rest].text in ("{", ";" if prototypes else "{")

    def _arguments(self, i: int) -> tuple[int, Token]:
        """How many arguments a call has whose parenthesis opens at i, and the token that closes it."""
        end = self._closing(i)
        depth, count = 0, 1
        for token in self._solid[i:end]:
            if token.kind == "mark":
                depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(token.text, 0)
                count += token.text == "," and depth == 1
        return count, self._solid[end]

    def _change(self, token: Token, new: str, name: str) -> None:
        self._edits.append(Edit(token.start, token.start + len(token.text), new))
        self._out.counts[name] += 1

    def _leave(self, token: Token, reason: str) -> None:
        self._out.left.append(Left(self._lines.line(token.start), token.text, reason))

    def _include(self, token: Token) -> None:
        if token.text in INCLUDES:
            self._change(token, INCLUDES[token.text], f"#include {token.text}")
        elif _HEADERS.match(token.text):
            self._leave(token, "this header is not in the table")

    def _name(self, i: int, token: Token) -> None:
        if token.text in self._own:
            if self._own[token.text] == i and token.text in TABLE:
                self._leave(token, "the source defines this name itself: it is left everywhere in it")
            return
        if token.text in TABLE:
            new = TABLE[token.text][1]
            if self._before(i) == "enum":
                new = cufile_c.TAGS.get(token.text, new)
            self._change(token, new, token.text)
            if token.text == "cudaMallocHost" and self._after(i) == "(":  # C has no default for the flags
                count, end = self._arguments(i + 1)
                if count == 2:
                    self._edits.append(Edit(end.start, end.start, ", hipHostMallocDefault"))
        elif token.text in cufile_c.LEFT:
            self._leave(token, cufile_c.LEFT[token.text])
        elif _LOOKS.fullmatch(token.text) and self._is_used(i):
            driver = _DRIVER.match(token.text) and not token.text.startswith(("CUfile", "CUFile", "cuFile"))
            self._leave(token, "the driver API is not in the table" if driver else "it is not in the table")

    def _is_used(self, i: int) -> bool:
        """Whether a name that looks like a library's is likely to be one: called, or a type
        or constant of that style."""
        text = self._solid[i].text
        if _LIBRARIES.match(text):
            return self._after(i) == "("
        if re.fullmatch(r"cuda[A-Z]\w*|cu[A-Z][a-z]\w*|cuFile\w+", text):
            return (
                self._after(i) == "("
                or text.endswith("_t")
                or self._before(i) in ("=", "|", "==", "!=", "case", ",", "(")
            )
        return True

    def _string(self, token: Token) -> None:
        """A table's name as a whole string: dlsym and its like."""
        inner = token.text.strip('"')
        if inner in TABLE:
            self._leave(
                Token("string", inner, token.start),
                "a name in a string is left; look whether it is looked up at run time",
            )
