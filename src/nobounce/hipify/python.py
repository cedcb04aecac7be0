"""Python sources: finds what they use of the old libraries, has the rules propose changes, and makes
those that keep the meaning."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import libcst as cst

from nobounce.errors import InternalError
from nobounce.hipify import cufile, cufilepy, gds, kvikio, runtime
from nobounce.hipify.cufile_names import CALLS as CUFILE_CALLS
from nobounce.hipify.cufile_names import DESCR, ENUMS
from nobounce.hipify.edits import apply
from nobounce.hipify.flow import Flow
from nobounce.hipify.imports import HIP_STATEMENTS, STATEMENTS, Imports, is_check
from nobounce.hipify.names import CALLS, CONSTANTS, TYPES
from nobounce.hipify.proposal import Proposal, is_getter, is_plain, is_statement
from nobounce.hipify.report import LIBRARIES, Converted, Left, Target
from nobounce.hipify.source import Meaning, Source, chain_of, walk, within


def convert_python(text: str, target: Target) -> Converted:
    """Rewrite a source. Raises libcst.ParserSyntaxError."""
    cst.parse_module(text)
    if not any(word in text for word in ("kvikio", "cufile", "cuda")):
        return Converted(text)
    return _Conversion(Source(text), target).run()


class _Conversion:
    def __init__(self, source: Source, target: Target) -> None:
        self._source, self._target = source, target
        self._references: list[tuple[cst.BaseExpression, Meaning]] = []
        self._names: dict[int, str] = {}
        self._out = Proposal(source)
        self._left: list[Left] = []

    def run(self) -> Converted:
        source, out = self._source, self._out
        self._find(source.module)
        if not self._references:
            return Converted(source.text, left=sorted(set(self._left)))
        taken = self._taken()
        if not taken:
            self._propose()
        self._say_left(taken)
        if out.claimed:
            if any(name == "helper" for name, _ in out.needs):
                out.insert(source.top(), cufile.HELPER.replace("\n", source.newline) + source.newline * 2)
                out.needs = [(name, node) for name, node in out.needs if name != "helper"]
            statements = STATEMENTS | (HIP_STATEMENTS if self._target == "hip" else {})
            Imports(source, LIBRARIES, self._references, out, statements).rewrite()
        text = apply(source.text, out.edits)
        _check(text)
        return Converted(text, out.counts, sorted(set(self._left)), sorted(set(out.notes)))

    def _propose(self) -> None:
        makes = {**kvikio.MAKES, **gds.Gds.makes, **cufilepy.CufilePython.makes, DESCR: DESCR}
        flow = Flow(self._source, makes, kvikio.RESULTS, self._dotted)
        families = [self._cufile(flow), self._runtime()]
        if self._target == "hip" and any(f.problems for f in families):
            self._refuse_together(families)
        for family in families:
            self._take([family])
        if self._target == "hip":
            return
        for rules, needless in (
            (kvikio.Kvikio(self._source, flow), kvikio.NEEDLESS),
            (gds.Gds(self._source, flow), gds.NEEDLESS),
            (cufilepy.CufilePython(self._source, flow), frozenset[str]()),
        ):
            if self._take(rules.proposals()):
                self._drop(needless, set(rules.makes))

    def _take(self, proposals: list[Proposal]) -> bool:
        """Keep what can be done; whether all can."""
        for proposal in proposals:
            if proposal.problems:
                self._left += proposal.problems
            else:
                self._out.add(proposal)
        return not any(p.problems for p in proposals)

    def _of(self, module: str) -> list[tuple[cst.BaseExpression, Meaning]]:
        return [(n, m) for n, m in self._references if within(m.dotted, module) and not self._is_presence(n)]

    def _cufile(self, flow: Flow) -> Proposal:
        return cufile.Cufile(self._source, flow, self._target).proposal(self._of(cufile.MODULE))

    def _runtime(self) -> Proposal:
        rule = runtime.Runtime(self._source, self._target)
        out = rule.proposal(self._of(runtime.MODULE))
        by_method = rule.pointers_by_method() if out.claimed else None
        if by_method is not None:
            out.refuse(by_method, runtime.MODULE, "getPtr() is a method of CUDA's objects; use int(x)")
        return out

    def _refuse_together(self, families: list[Proposal]) -> None:
        """HIP's libraries cannot use CUDA's memory, nor the other way round."""
        for family in families:
            if not family.problems and family.claimed:
                family.refuse(
                    family.claimed[0],
                    "cuda.bindings",
                    "other calls of CUDA stay, and memory is of one runtime",
                )

    def _drop(self, needless: frozenset[str], classes: set[str]) -> None:
        """Take away calls that nobounce's objects make needless, where no object of the library stays."""
        gone = {id(n) for n in self._out.claimed}
        if any(m.dotted in classes and id(n) not in gone for n, m in self._references):
            return
        dropped: Counter[int] = Counter()
        for node, meaning in self._references:
            call = self._source.parent(node)
            if meaning.dotted not in needless or meaning.rebound or not isinstance(call, cst.Call):
                continue
            if call.func is not node or not is_statement(self._source, call):
                continue
            if all(is_plain(a.value) or is_getter(a.value) for a in call.args):
                statement = self._source.parent(call)
                if statement is not None:
                    block = self._source.block(statement)
                    dropped[id(block)] += 1
                    self._out.edits.append(self._source.without(statement, dropped[id(block)]))
                    self._out.claimed.append(node)
                    self._out.counts[meaning.dotted] += 1

    def _say_left(self, taken: str) -> None:
        gone = {id(n) for n in self._out.claimed}
        told = {(item.line, item.name) for item in self._left}
        for node, meaning in self._references:
            if id(node) in gone or self._is_presence(node):
                continue
            left = Left(self._source.line(node), meaning.dotted, self._why(meaning, taken))
            if (left.line, left.name) not in told:
                self._left.append(left)

    def _is_presence(self, node: cst.BaseExpression) -> bool:
        return is_check(self._source, node)

    # finding

    def _find(self, node: cst.CSTNode) -> None:
        """Every reference to one of the libraries: the longest chain of attributes."""
        if isinstance(node, cst.Import | cst.ImportFrom):
            self._star(node)
            return
        if isinstance(node, cst.Name | cst.Attribute):
            meaning = self._source.meaning(node)
            if meaning is not None:
                if node in meaning.binding.nones:
                    return
                if self._library(meaning.dotted):
                    self._references.append((node, meaning))
                    self._names[id(node)] = "" if meaning.rebound else meaning.dotted
                return
            if isinstance(node, cst.Attribute):
                self._find(node.value)
            return
        if isinstance(node, cst.Call):
            self._by_string(node)
        for child in node.children:
            self._find(child)

    def _library(self, dotted: str) -> str:
        return next((name for name in LIBRARIES if within(dotted, name)), "")

    def _dotted(self, node: cst.BaseExpression) -> str:
        return self._names.get(id(node), "")

    def _star(self, node: cst.Import | cst.ImportFrom) -> None:
        if (
            isinstance(node, cst.ImportFrom)
            and isinstance(node.names, cst.ImportStar)
            and node.module is not None
        ):
            module = chain_of(node.module)
            if not node.relative and self._library(module):
                self._left.append(
                    Left(self._source.line(node), module, "names that come by * cannot be told from others")
                )

    def _by_string(self, node: cst.Call) -> None:
        """import_module("kvikio") and its like."""
        called = chain_of(node.func).rpartition(".")[2]
        if called in ("import_module", "__import__", "importorskip", "find_spec") and node.args:
            value = node.args[0].value
            if isinstance(value, cst.SimpleString) and self._library(str(value.raw_value)):
                self._left.append(
                    Left(
                        self._source.line(node),
                        str(value.raw_value),
                        f"it is named in a string, for {called}()",
                    )
                )

    # what is left

    def _taken(self) -> str:
        """A name of ours that the source uses for something else."""
        names = ("hip", "hipfile") if self._target == "hip" else ("nobounce", "hip", "hipfile")
        uses = any(
            within(m.dotted, "cuda.bindings") or within(m.dotted, "cufile") for _, m in self._references
        )
        for node in walk(self._source.module):
            if isinstance(node, cst.Name) and node.value in names and (uses or node.value == "nobounce"):
                for found in self._source.assignments(node):
                    if not self._source.is_import_of(found, ("nobounce", "hip")):
                        return str(node.value)
        return ""

    def _why(self, meaning: Meaning, taken: str) -> str:
        if meaning.rebound:
            return f"`{meaning.binding.name}` is bound to something else in line {meaning.rebound} as well"
        if taken:
            return f"`{taken}` means something else in this file"
        if meaning.dotted in LIBRARIES:
            return "the module itself is used"
        if self._target == "hip":
            return _reason(meaning.dotted, (_HIP_REASONS,))
        if meaning.dotted in kvikio.NEEDLESS | gds.NEEDLESS:
            return "nobounce's files need no such call; it stays with the library's objects that stay"
        if any(meaning.dotted in t for t in (kvikio.MAKES, gds.Gds.makes, cufilepy.CufilePython.makes)):
            return "it is used in a way that cannot be followed, or with an object that stays"
        return self._known(meaning.dotted) or _reason(meaning.dotted, _REASONS)

    def _known(self, dotted: str) -> str:
        """Why a name of the tables is left: for the sake of others."""
        for module, table in ((cufile.MODULE, {**CUFILE_CALLS, **ENUMS}), (runtime.MODULE, RUNTIME_NAMES)):
            rest = dotted.removeprefix(f"{module}.")
            if rest != dotted and (rest in table or rest.split(".")[0] in table):
                return _TOGETHER[module]
        return ""


RUNTIME_NAMES = {**CALLS, **CONSTANTS, **TYPES}
_REASONS = (kvikio.REASONS, gds.REASONS, cufilepy.REASONS, cufile.REASONS, runtime.REASONS)
_TOGETHER = {
    cufile.MODULE: "it stays with the others of its module, which cannot all be rewritten",
    runtime.MODULE: "it stays with the others of its module, which cannot all be rewritten",
}
_HIP_REASONS = {
    "kvikio": "HIP's bindings have nothing like kvikio; --to nobounce has",
    **gds.HIP_REASONS,
    **cufilepy.HIP_REASONS,
    "cuda.bindings.driver": runtime.REASONS["cuda.bindings.driver"],
    **_TOGETHER,
}


def _check(text: str) -> None:
    """A mistake of the rules is no reason to write a source that does not parse."""
    try:
        cst.parse_module(text)
    except cst.ParserSyntaxError as e:
        raise InternalError(
            f"what it would become has a syntax error in line {e.raw_line}; it stays as it is"
        ) from None


def _reason(dotted: str, tables: Sequence[dict[str, str]]) -> str:
    """The most exact reason there is."""
    found = [(len(n), r) for t in tables for n, r in t.items() if within(dotted, n)]
    return max(found)[1] if found else "it is not in the table"
