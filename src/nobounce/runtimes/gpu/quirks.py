"""What the vendors' runtimes are known to do otherwise than the rules say: data, no code of the product.

A conformance class on real hardware takes away the tests that a row names, and nothing else. `versions` says
for which releases it is known; "" means all.
"""

from __future__ import annotations

from nobounce.records import record


@record
class Quirk:
    """`tests` are names of conformance tests that do not hold; none where the rules
    are kept by other means."""

    runtime: str
    rule: str
    sentence: str
    versions: str = ""
    tests: tuple[str, ...] = ()


QUIRKS = (
    Quirk(
        "cuda",
        "14",
        "A handle that is no stream is undefined behaviour (it crashes): the runtime cannot check callers' "
        "own streams.",
        tests=("test_rule_14_a_destroyed_stream_is_always_refused",),
    ),
    Quirk(
        "cuda",
        "65",
        "With unified addressing the direction of a copy is taken from the pointers; a kind that "
        "contradicts them passes.",
        tests=("test_rule_65_a_kind_that_contradicts_is_refused",),
    ),
    Quirk(
        "cuda",
        "67",
        "Overlapping copies are not refused.",
        tests=("test_rule_67_copying_onto_itself",),
    ),
    Quirk(
        "cuda",
        "gates",
        "Streams share 8 hardware queues (CUDA_DEVICE_MAX_CONNECTIONS, up to 32): the gate of a ninth "
        "stream is reached when "
        "one of the eight is opened. Copies on streams that only copy are not held up.",
        tests=("test_many_gates_and_streams_at_once",),
    ),
    Quirk(
        "cuda",
        "gates",
        "Making a stream may wait for closed gates, and copies of other threads wait for it: make streams "
        "before transfers are "
        "queued. The bounce ring makes its own before its first gate.",
    ),
    Quirk(
        "cuda",
        "133",
        "cuda-bindings answer 0 for the device of every pointer; the runtime asks libcuda itself.",
        versions="13.1-13.3",
    ),
    Quirk("hip", "gates", "Streams share 4 hardware queues (GPU_MAX_HW_QUEUES), with the same effect."),
    Quirk("hip", "14", "HIP 7.0 and later do not validate stream handles.", versions="7.0-"),
    Quirk(
        "hip",
        "128",
        "There is no flag for read-only host memory: it is registered as memory that may be written.",
    ),
    Quirk(
        "hip",
        "88",
        "The bindings' hipThreadExchangeStreamCaptureMode takes no mode: the runtime asks the library for "
        "the function.",
    ),
    Quirk("hip", "symbols", "hipGetProcAddress, hence direct I/O, came with 6.2.", versions="-6.1"),
    Quirk(
        "hip",
        "74",
        "Before 7.0 the last error was the last status; the runtime keeps its own.",
        versions="-6.4",
    ),
    Quirk(
        "hip", "133", "Before 7.0 unknown memory is InvalidValue instead of unregistered.", versions="-6.4"
    ),
    Quirk(
        "hip",
        "118",
        "Before 7.0 hipFreeAsync of null was refused; the runtime does not pass it on.",
        versions="-6.4",
    ),
    Quirk("hip", "118", "Before 7.11 hipMallocAsync waits for the default stream.", versions="-7.10"),
    Quirk("hip", "83", "7.0.0 and 7.0.1 break hipLaunchHostFunc in stream capture.", versions="7.0.0-7.0.1"),
    Quirk(
        "hip",
        "23",
        "Before 7.15 waiting for and writing values cannot be captured into a graph.",
        versions="-7.14",
    ),
)


def conformance_exceptions(runtime: str) -> frozenset[str]:
    """Names of conformance tests that do not hold on `runtime`."""
    return frozenset(test for quirk in QUIRKS if quirk.runtime == runtime for test in quirk.tests)
