"""stats, trace, report, compare and bench as a person and a script use them."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from nobounce import config
from nobounce.cli import compare
from nobounce.cli.children import command_line
from nobounce.cli.main import app
from nobounce.cli.stats import parse_interval
from nobounce.errors import ArgumentError

MIB = 1 << 20

PROGRAM = """
import sys, nobounce
with nobounce.open(sys.argv[1]) as f, nobounce.Device("sim:0").allocate(65536) as b:
    f.read(b, cache="avoid")
    if len(sys.argv) > 2: f.read(b, require="fallback", cache="avoid")
print("my own output")
sys.exit(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
"""


def nobounce(*arguments: str | Path) -> Result:
    config.override(None)
    return CliRunner().invoke(app, [str(a) for a in arguments])


def run(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nobounce.cli.main", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, **variables},
    )


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    with path.open("wb") as f:
        f.write(os.urandom(2 * MIB))
        os.fsync(f.fileno())
    return path


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "prog.py").write_text(PROGRAM)
    return tmp_path / "prog.py"


def test_stats_keeps_the_programs_output_and_exit_code_apart_from_its_own(data: Path, program: Path) -> None:
    done = run("stats", "--", program, data, "7")
    assert done.returncode == 7
    assert done.stdout == "my own output\n"
    assert "Total Fastpath read size (B): 65536" in done.stderr
    assert "Total Fallback read size (B): 65536" in done.stderr
    assert "Compatibility mode: allowed true, forced false" in done.stderr
    assert "Statistics level: 1" in done.stderr


def test_stats_expect_fastpath(data: Path, program: Path) -> None:
    assert run("stats", "--expect", "fastpath", "--", program, data).returncode == 0
    bounced = run("stats", "--expect", "fastpath", "--", program, data, "0")
    assert bounced.returncode == 1
    assert "65536 bytes fallback" in bounced.stderr
    nothing = run("stats", "--expect", "fastpath", "--", sys.executable, "-c", "pass")
    assert nothing.returncode == 1
    assert "no process used nobounce" in nothing.stderr


def test_stats_to_a_file_in_each_form(data: Path, program: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for form in ("--json", "--csv", "--prometheus"):
        done = run("stats", form, "-o", out, "--", program, data)
        assert (done.returncode, done.stderr) == (0, "")
        text = out.read_text()
        if form == "--json":
            told = json.loads(text)
            assert told["schema"] == "nobounce.stats/1"
            assert {"version", "total", "processes", "exit_code", "unmet"} <= told.keys()
            assert told["total"]["fastpath_bytes"] == 65536
        elif form == "--csv":
            assert [r["nbytes"] for r in csv.DictReader(io.StringIO(text))] == ["65536"]
        else:
            assert "nobounce_bytes_total{" in text


def test_stats_composes_with_our_own_verbs(tmp_path: Path) -> None:
    done = run(
        "stats",
        "--verify",
        "--json",
        "--",
        "nobounce",
        "roundtrip",
        tmp_path / "a",
        tmp_path / "b",
        "--device",
        "sim:0",
        "--streams",
        "2",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("OK  ")
    told = json.loads(done.stderr)
    assert told["total"]["fastpath_bytes"] == 4 * MIB  # 2 MiB in, 2 MiB out
    assert told["total"]["counters"]["stream_register_ok"] == 2
    assert told["total"]["counters"]["stream_deregister_ok"] == 2
    assert told["verify"]["agrees"] is True


def test_stats_level_0_counts_nothing_and_says_so(data: Path, program: Path) -> None:
    done = run("stats", "--", program, data, HIPFILE_STATS_LEVEL="0")
    assert done.returncode == 0
    assert "HIPFILE_STATS_LEVEL is 0" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["stats"],
        ["stats", "-p", "1", "--", "true"],
        ["stats", "--now", "--", "true"],
        ["stats", "--expect", "fallback", "--", "true"],
        ["stats", "--json", "--csv", "--", "true"],
        ["stats", "--watch", "soon", "-p", "1"],
        ["stats", "-p", "0"],
        ["stats", "--", "no-such-program-anywhere"],
        ["trace", "--", "no-such-program-anywhere"],
        ["bench", "/no/such/folder"],
        ["report"],
        ["report", "x.json", "--limits-dir", "/no/such/folder"],
        ["report", "x.json", "--limits-dir", "/", "--no-measure"],
    ],
)
def test_wrong_usage_is_2(arguments: list[str]) -> None:
    assert nobounce(*arguments).exit_code == 2


@pytest.mark.parametrize(
    "arguments", [["stats", "-p", str((1 << 22) + 5)], ["report", "/no/such.json"], ["compare", "/no/such"]]
)
def test_what_is_not_there_is_1(arguments: list[str]) -> None:
    assert nobounce(*arguments).exit_code == 1


def test_intervals() -> None:
    assert [parse_interval(t) for t in ("1s", "500ms", "2", "0.5s", None)] == [1, 0.5, 2, 0.5, None]
    for text in ("", "0s", "1h", "-1s"):
        with pytest.raises(ArgumentError):
            parse_interval(text)


def test_programs_by_name(tmp_path: Path) -> None:
    script = tmp_path / "x.py"
    script.write_text("")
    assert command_line([str(script), "a"]) == [sys.executable, str(script), "a"]
    assert command_line(["nobounce", "config"])[1:] == ["-P", "-m", "nobounce", "config"]
    assert command_line(["true"]) == ["true"]


def test_programs_that_the_system_cannot_execute(data: Path, program: Path, tmp_path: Path) -> None:
    program.chmod(0o755)  # and no #! in it
    assert run("stats", "--", program, data).stdout == "my own output\n"
    program.write_text(f"#!{sys.executable}\n{PROGRAM}")
    assert command_line([str(program)]) == [str(program)]
    assert run("stats", "--", program, data).stdout == "my own output\n"
    (tmp_path / "odd").write_bytes(b"\0\1")
    (tmp_path / "odd").chmod(0o755)
    done = run("stats", "--", tmp_path / "odd")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "ENOEXEC" in done.stderr


def test_modules_are_programs_too(data: Path, program: Path, tmp_path: Path) -> None:
    done = run("stats", "--json", "--", "-m", "prog", data, "5", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (5, "my own output\n")
    assert json.loads(done.stderr)["total"]["fastpath_bytes"] == 65536


def test_a_report_that_cannot_be_written_is_found_before_the_program_runs(data: Path, program: Path) -> None:
    done = run("stats", "-o", "/no/such/file", "--", program, data)
    assert (done.returncode, done.stdout) == (1, "")
    assert "/no/such/file" in done.stderr


@pytest.mark.parametrize("verb", ["stats", "trace"])
def test_death_by_a_signal_is_passed_on(verb: str, tmp_path: Path) -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
    done = run(verb, "-o", tmp_path / "out.json", "--", sys.executable, "-c", code)
    assert done.returncode == 128 + 15


def test_trace_then_report(data: Path, program: Path, tmp_path: Path) -> None:
    trace, page = tmp_path / "t.json", tmp_path / "r.html"
    done = run("trace", "-o", trace, "--", program, data, "3")
    assert done.returncode == 3
    assert done.stdout == "my own output\n"
    assert "of 1 process in" in done.stderr
    done = run("report", trace, "-o", page, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["totals"]["fastpath_bytes"] == told["totals"]["fallback_bytes"] == 65536
    assert told["limits"]["host memory"] > 0
    assert "65,536 bytes" in page.read_text()


def test_report_finds_what_the_variable_made(data: Path, program: Path, tmp_path: Path) -> None:
    trace, page = tmp_path / "t.json", tmp_path / "r.html"
    done = subprocess.run(
        [sys.executable, program, data],
        env={**os.environ, "NOBOUNCE_TRACE": str(trace)},
        check=True,
        capture_output=True,
        timeout=60,
    )
    assert done.stdout == b"my own output\n"
    result = nobounce("report", trace, "-o", page, "--no-measure")
    assert result.exit_code == 0, result.output
    assert "fastpath 65536 bytes" in result.stdout


def test_report_takes_the_limits_of_bench(data: Path, tmp_path: Path) -> None:
    limits = tmp_path / "limits.json"
    limits.write_text(json.dumps({"limits": {"disk read": 5}}))
    trace = tmp_path / "t.json"
    trace.write_text("[]")
    done = nobounce("report", trace, "-o", tmp_path / "r.html", "--limits", limits, "--json")
    assert json.loads(done.stdout)["limits"] == {"disk read": 5}
    limits.write_text("{}")
    assert nobounce("report", trace, "-o", tmp_path / "r.html", "--limits", limits).exit_code == 1


WRITER = """
import sys, nobounce
with nobounce.open(sys.argv[1], "r+") as f, nobounce.Device("sim:0").allocate(1 << 20) as b:
    f.write(b, fsync=True)
"""


def test_report_says_that_the_write_limit_is_unknown_and_measures_it_where_it_may(
    data: Path, tmp_path: Path
) -> None:
    trace, page, folder = tmp_path / "t.json", tmp_path / "r.html", tmp_path / "there"
    folder.mkdir()
    assert run("trace", "-o", trace, "--", sys.executable, "-c", WRITER, data).returncode == 0
    before = sorted(p.name for p in tmp_path.iterdir())
    done = nobounce("report", trace, "-o", page)
    assert "fastpath write" in done.stdout
    assert "disk write: not measured; nobounce report --limits-dir FOLDER measures it" in done.stdout
    assert "disk write: not measured" in page.read_text()
    done = nobounce("report", trace, "-o", page, "--limits-dir", folder, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["limits"]["disk write"] > 0
    write = next(r for r in told["roofs"] if r["way"] == "fastpath write")
    assert "disk write" in [name for name, _ in write["limits"]]
    assert "not measured" not in write["sentence"]
    assert list(folder.iterdir()) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*before, "r.html"])


def test_compare_holds_everything_equal_and_shows_paths_first(data: Path) -> None:
    done = nobounce(
        "compare", data, "--device", "sim:0", "--rounds", "1", "--slice", "512KiB", "--streams", "2"
    )
    assert done.exit_code == 0, done.output
    rows = {
        line.split()[0]: line.split()[1:4]
        for line in done.stdout.splitlines()
        if line.split()[0] in compare.MODES
    }
    assert rows["direct"] == [str(2 * MIB), "0", "0"]
    assert rows["fallback"] == ["0", str(2 * MIB), str(4 * MIB)]
    assert rows["auto"] == rows["direct"]
    heading = next(line for line in done.stdout.splitlines() if line.startswith("mode "))
    assert heading.split()[-1] == "GiB/s"


def test_compare_on_cpu_says_that_nothing_is_relayed_and_offers_sim(data: Path) -> None:
    done = nobounce("compare", data, "--device", "cpu", "--rounds", "1", "--json")
    told = json.loads(done.stdout)
    assert "no relay" in told["note"]
    assert "sim:0" in told["note"]
    fallback = next(m for m in told["modes"] if m["mode"] == "fallback")
    assert fallback["host_traffic_bytes"] == 0


def test_compare_writes_beside_and_leaves_nothing(data: Path) -> None:
    before = data.read_bytes()
    done = nobounce("compare", data, "--device", "sim:0", "--rounds", "1", "--write", "--json")
    assert done.exit_code == 0, done.output
    assert [m["fastpath_bytes"] for m in json.loads(done.stdout)["modes"]] == [2 * MIB, 2 * MIB, 0]
    assert data.read_bytes() == before
    assert [p.name for p in data.parent.iterdir()] == ["data"]


def sample(direct: int, bounced: int, *errors: str) -> dict[str, Any]:
    stats = {
        "fastpath_bytes": direct,
        "fallback_bytes": bounced,
        "host_traffic_bytes": 2 * bounced,
        "reasons": {},
    }
    return {"seconds": 2.0, "errors": list(errors), "stats": stats}


@pytest.mark.parametrize(
    ("mode", "samples", "rate"),
    [
        ("direct", [sample(10, 0), sample(30, 0)], 10.0),
        ("direct", [sample(10, 0), sample(9, 1)], None),
        ("fallback", [sample(0, 10)], 5.0),
        ("fallback", [sample(1, 10)], None),
        ("auto", [sample(5, 5)], 5.0),
        ("auto", [sample(5, 5, "broke")], None),
        ("direct", [{"seconds": 0.0, "errors": ["refused: no-p2p"], "stats": None}], None),
        ("auto", [sample(0, 0)], None),
    ],
)
def test_compare_withholds_the_rate_of_a_run_that_is_not_what_it_claims(
    mode: str, samples: list[dict[str, Any]], rate: float | None
) -> None:
    found = compare.judge(mode, samples)
    assert found["bytes_per_second"] == rate
    assert bool(found["withheld"]) == (rate is None)


def test_compare_shows_a_direct_path_that_is_refused(data: Path) -> None:
    done = run("compare", data, "--device", "sim:0", "--rounds", "1", "--slice", "4097", "--json")
    modes = {m["mode"]: m for m in json.loads(done.stdout)["modes"]}
    assert modes["direct"]["bytes_per_second"] is None
    assert "align" in modes["direct"]["withheld"]


@pytest.mark.serial
def test_bench_measures_limits_and_both_backends_and_cleans_up(tmp_path: Path) -> None:
    folder = tmp_path / "only here"
    folder.mkdir()
    done = nobounce(
        "bench",
        folder,
        "--device",
        "sim:0",
        "--size",
        "8MiB",
        "--rounds",
        "1",
        "-o",
        tmp_path / "b.json",
        "--json",
    )
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told == json.loads((tmp_path / "b.json").read_text())
    assert {"disk read", "disk write", "host memory", "link to device", "link from device"} <= told[
        "limits"
    ].keys()
    assert [(j["verb"], j["backend"], j["error"]) for j in told["jobs"]] == [
        (v, b, "") for v in ("load", "read", "write") for b in ("fastpath", "fallback")
    ]
    assert list(folder.iterdir()) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b.json", "only here"]


@pytest.mark.serial
def test_bench_speaks_as_fio_does(tmp_path: Path) -> None:
    done = nobounce("bench", tmp_path, "--device", "cpu", "--size", "8MiB", "--rounds", "1")
    assert done.exit_code == 0, done.output
    assert "read fastpath: IOPS=" in done.stdout
    assert "BW=" in done.stdout
    assert "(8MiB/" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", ["SIGTERM", "SIGHUP"])
def test_a_program_under_trace_is_told_to_end_and_its_trace_is_kept(
    data: Path, tmp_path: Path, number: str
) -> None:
    import signal

    program = f"""
import nobounce, signal, sys, time
def end(*_):
    print("told", flush=True)
    sys.exit(7)
signal.signal(signal.{number}, end)
with nobounce.open({str(data)!r}) as f, nobounce.Device("sim:0").allocate(4096) as b:
    f.read(b, nbytes=4096, cache="avoid")
print("ready", flush=True)
for _ in range(600):  # one long sleep may begin just behind the look for signals, and end with the test's patience
    time.sleep(0.1)
"""
    out = tmp_path / "trace.json"
    command = [sys.executable, "-m", "nobounce", "trace", "-o", out, "--", sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(getattr(signal, number))
        said, _ = child.communicate(timeout=60)
    assert said.startswith("told\n")
    assert child.returncode == 7
    assert json.loads(out.read_text())["traceEvents"]


def test_stats_of_a_running_process_that_is_ended_says_so(tmp_path: Path) -> None:
    import signal

    program = "import nobounce; nobounce.Device('cpu').allocate(1); from nobounce.io import hooks; hooks.start(); print('ready', flush=True); input()"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as watched:
        assert watched.stdout is not None
        assert watched.stdout.readline() == "ready\n"
        command = [sys.executable, "-u", "-m", "nobounce", "stats", "-p", str(watched.pid), "--watch", "50ms"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
            assert child.stderr is not None
            child.stderr.readline()
            child.send_signal(signal.SIGTERM)
            _, told = child.communicate(timeout=60)
        assert child.returncode == 143
        assert told.endswith("nobounce stats: ended by SIGTERM\n")
        watched.communicate("\n", timeout=60)


def files_open_in(folder: Path, pid: int) -> list[str]:
    """What the process has open in the folder; files that have no name are found by this alone."""
    links = (os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd"))
    return [link for link in links if link.startswith(f"{folder}/")]


def test_bench_that_is_ended_cleans_up(tmp_path: Path) -> None:
    import signal

    with subprocess.Popen(
        [
            sys.executable,
            "-u",
            "-m",
            "nobounce.cli.main",
            "bench",
            tmp_path,
            "--device",
            "cpu",
            "--size",
            "64MiB",
            "--rounds",
            "50",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline().startswith("machine:")
        assert len(files_open_in(tmp_path, child.pid)) >= 2, "the model and the file to write over"
        child.send_signal(signal.SIGTERM)
        _, told = child.communicate(timeout=60)
    assert (told, child.returncode) == ("nobounce bench: ended by SIGTERM\n", 143)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("what", "said"), [("folder", "EISDIR"), ("pipe", "is a pipe"), ("nothing", "ENOENT")]
)
def test_compare_names_what_is_no_file(tmp_path: Path, what: str, said: str) -> None:
    odd = tmp_path / "odd"
    if what == "folder":
        odd.mkdir()
    elif what == "pipe":
        os.mkfifo(odd)
    done = nobounce("compare", odd, "--device", "cpu")
    assert done.exit_code == 1
    assert said in done.stderr


@pytest.mark.parametrize(("what", "said"), [("folder", "a folder"), ("pipe", "a pipe"), ("device", "a char")])
@pytest.mark.parametrize("arguments", [[], ["--limits"]])
def test_report_waits_for_no_pipe(
    data: Path, tmp_path: Path, arguments: list[str], what: str, said: str
) -> None:
    odd = tmp_path / "odd"
    if what == "folder":
        odd.mkdir()
    elif what == "pipe":
        os.mkfifo(odd)
    else:
        odd = Path("/dev/null")
    trace = tmp_path / "trace.json"
    trace.write_text('{"displayTimeUnit":"ms","traceEvents":[\n')
    done = run("report", *([trace, *arguments] if arguments else []), odd, "-o", tmp_path / "page")
    if what == "folder" and not arguments:  # as NOBOUNCE_TRACE, it stands for the traces in it
        assert done.returncode == 1
        assert done.stderr == (
            f"nobounce report: {odd}/trace.json: cannot open: No such file or directory (ENOENT)\n"
        )
    else:
        assert done.returncode == 2, done.stderr
        assert done.stderr.startswith(f"nobounce report: {odd}: is {said}")
        assert done.stderr.count("\n") == 1
    assert not (tmp_path / "page").exists()


def test_reports_call_the_command_by_its_name(tmp_path: Path) -> None:
    out = tmp_path / "o"
    done = nobounce(
        "stats", "-o", out, "--", "nobounce", "roundtrip", tmp_path / "r", tmp_path / "w", "--device", "cpu"
    )
    assert done.exit_code == 0, done.output
    assert f"Command: nobounce roundtrip {tmp_path / 'r'}" in out.read_text()


def test_a_program_that_is_no_program_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").write_text("echo hello\n")
    for program, why in {
        "./mine": "./mine is not executable: run `chmod \\+x` on it, or write its interpreter before it",
        "mine": "there is no program mine in PATH; for the file of that name in this folder write ./mine",
        "./none": "there is no program ./none",
        ".": ". is a folder, no program",
    }.items():
        with pytest.raises(ArgumentError, match=f"^{why}$"):
            command_line([program])
    (tmp_path / "mine").chmod(0o755)
    assert command_line(["./mine"]) == ["./mine"]


def test_a_script_whose_interpreter_is_missing_is_not_said_to_be_missing_itself(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    done = run("stats", "--", script)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr == f"nobounce stats: {script}: the interpreter that its first line names is not there\n"
    )
