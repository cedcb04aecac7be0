"""K5: the environment. Where the published library takes a value it cannot read for unset, an error names the variable;
the profile hipfile-0.5 reads as published."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hipfile_rig import BLOCK, OK, Rig, pattern
from nobounce import config, hipfile
from nobounce.config import Settings
from nobounce.errors import ConfigError
from nobounce.hipfile import whole
from nobounce.hipfile.driver import STATE
from nobounce.testing.faults import inject
from situations import EXT4, request

PUBLISHED = {"NOBOUNCE_PROFILE": "hipfile-0.5"}
FORCE, ALLOW = "HIPFILE_FORCE_COMPAT_MODE", "HIPFILE_ALLOW_COMPAT_MODE"
ANY_FS = "HIPFILE_UNSUPPORTED_FILE_SYSTEMS"


def _in(**environment: str) -> Settings:
    return Settings.from_environment(environment)


def _published(**environment: str) -> Settings:
    return Settings.from_environment({**PUBLISHED, **environment})


def _scores(in_force: Settings, **changes: Any) -> tuple[int, int]:
    scores = whole.score(whole.adapt(request(**changes), in_force))
    return scores.fastpath.value, scores.fallback.value


def test_K069_bool() -> None:
    assert _in().force_compat_mode is False
    for text in ("true", "TRUE", "True"):
        assert _in(**{FORCE: text}).force_compat_mode is True
        assert _published(**{FORCE: text}).force_compat_mode is True
    assert _in(**{ALLOW: "False"}).allow_compat_mode is False
    assert _published(**{ALLOW: "False"}).allow_compat_mode is False
    with pytest.raises(ConfigError, match=f"{FORCE}='maybe'"):
        _in(**{FORCE: "maybe"})
    for junk in ("maybe", "1", "0", "yes", "on", ""):
        assert _published(**{FORCE: junk, ALLOW: junk}) == replace(
            Settings(), profile="hipfile-0.5", origin=_published().origin
        )
    assert _in(**{FORCE: "1"}).force_compat_mode is True


def test_K069_a_junk_bool_is_named_at_first_use(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    handle, memory = rig.file(pattern(BLOCK)), rig.memory(BLOCK)
    monkeypatch.setenv(ALLOW, "perhaps")
    config.override(None)
    with pytest.raises(ConfigError, match=ALLOW):
        hipfile.read(handle, memory.handle, BLOCK, 0, 0)
    with pytest.raises(ConfigError, match=ALLOW):
        hipfile.read_async(handle, memory.handle, BLOCK, 0, 0, hipfile.Cell())
    monkeypatch.setenv("NOBOUNCE_PROFILE", "hipfile-0.5")
    config.override(None)
    assert hipfile.read(handle, memory.handle, BLOCK, 0, 0) == BLOCK


def test_K070_uint() -> None:
    size = "HIPFILE_ASYNC_BUFFER_SIZE"
    assert _in().async_buffer_nbytes == 16 << 20
    for read in (_in, _published):
        assert read(**{size: "1048576"}).async_buffer_nbytes == 1 << 20
        assert read(**{size: "0"}).async_buffer_nbytes == 16 << 20
        assert read(**{size: "9" * 30}).async_buffer_nbytes == (1 << 63) - 1
    for junk in ("1k", "0x10", "-1", "1.5"):
        with pytest.raises(ConfigError, match=size):
            _in(**{size: junk})
        assert _published(**{size: junk}).async_buffer_nbytes == 16 << 20


def test_K071_force_unset_or_false_leaves_fastpath_on() -> None:
    for in_force in (_in(), _in(**{FORCE: "false"}), _published(**{FORCE: "junk"})):
        assert _scores(in_force) == (100, 1)


def test_K072_force_true_turns_fastpath_off() -> None:
    assert _scores(_in(**{FORCE: "true"})) == (-1, 1)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param("K073", id="K073_missing_read_symbol"),
        pytest.param("K074", id="K074_missing_write_symbol"),
    ],
)
def test_K073_K074_a_runtime_without_the_symbols_has_no_fastpath(rig: Rig, number: str) -> None:
    missing = "hipAmdFileRead" if number == "K073" else "hipAmdFileWrite"
    handle, memory = rig.file(pattern(BLOCK)), rig.memory(BLOCK)
    with inject(op="direct", because=f"{missing} cannot be resolved"):
        _, scores = hipfile.score(handle, memory.handle, BLOCK, 0, 0)
        assert scores is not None
        assert scores.fastpath.value == -1
        assert any(missing in r.sentence for r in scores.fastpath.refusals)
        assert hipfile.read(handle, memory.handle, BLOCK, 0, 0) == BLOCK


def test_K075_no_setting_beats_missing_symbols(rig: Rig) -> None:
    handle, memory = rig.file(pattern(BLOCK)), rig.memory(BLOCK)
    config.override(Settings(allow_compat_mode=False, force_compat_mode=False, unsupported_file_systems=True))
    assert hipfile.read(handle, memory.handle, BLOCK, 0, 0) == BLOCK
    with inject(op="direct"):
        assert hipfile.read(handle, memory.handle, BLOCK, 0, 0) == -5030


def test_K076_allow_unset_or_true_leaves_fallback_on() -> None:
    for in_force in (_in(), _in(**{ALLOW: "true"}), _published(**{ALLOW: "junk"})):
        assert _scores(in_force, file_offset=1) == (-1, 1)


def test_K077_allow_false_turns_fallback_off() -> None:
    assert _scores(_in(**{ALLOW: "false"}), file_offset=1) == (-1, -1)


def test_K078_overrides(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FORCE, "true")
    config.override(None)
    handle, memory = rig.file(pattern(BLOCK)), rig.memory(BLOCK)
    _, scores = hipfile.score(handle, memory.handle, BLOCK, 0, 0)
    assert scores is not None
    assert scores.fastpath.value == -1
    config.override(Settings(unsupported_file_systems=True))
    _, scores = hipfile.score(handle, memory.handle, BLOCK, 0, 0)
    assert scores is not None
    assert scores.fastpath.value == 100


def test_K079_stats_level() -> None:
    assert _in().stats_level == 1
    for text, level in (("0", 0), ("1", 1), ("2", 2), ("3", 3), ("99", 3)):
        assert _in(HIPFILE_STATS_LEVEL=text).stats_level == level
        assert _published(HIPFILE_STATS_LEVEL=text).stats_level == level
    with pytest.raises(ConfigError, match="HIPFILE_STATS_LEVEL"):
        _in(HIPFILE_STATS_LEVEL="many")
    assert _published(HIPFILE_STATS_LEVEL="many").stats_level == 1


def test_K080_unsupported_file_systems() -> None:
    btrfs = {"file": {"filesystem": replace(EXT4, fstype="btrfs", journal=None)}}
    for in_force in (_in(), _in(**{ANY_FS: "false"}), _published(**{ANY_FS: "junk"})):
        assert _scores(in_force, **btrfs) == (-1, 1)
    assert _scores(_in(**{ANY_FS: "true"}), **btrfs) == (100, 1)


def test_allow_false_with_force_true_fails_all_io(rig: Rig) -> None:
    """B-10, of which section L takes 0.5's word."""
    handle, memory, stream, done = rig.file(pattern(BLOCK)), rig.memory(BLOCK), rig.stream(), hipfile.Cell()
    config.override(Settings(allow_compat_mode=False, force_compat_mode=True))
    assert hipfile.read(handle, memory.handle, BLOCK, 0, 0) == -5030
    assert hipfile.read_async(handle, memory.handle, BLOCK, 0, 0, done, stream)[0] == 5030
    _, batch = hipfile.batch_io_setup(1)
    params = hipfile.IOParams(handle, hipfile.Opcode.BATCH_READ, hipfile.Batch(memory.handle, 0, 0, BLOCK))
    assert hipfile.batch_io_submit(batch, 1, [params]) == OK
    _, (event,) = hipfile.batch_io_get_status(batch, 1, 1)
    assert (event.status, event.result) == (hipfile.Status.FAILED, -5030)
    hipfile.batch_io_destroy(batch)


class TestParameters:
    """A-23: set while closed, applied by open, dropped by close."""

    def test_set_after_open_is_5026(self) -> None:
        hipfile.driver_open()
        assert hipfile.set_parameter_size_t(2, 4)[0] == 5026
        assert hipfile.driver_set_max_cache_size(4)[0] == 5026

    def test_a_value_is_staged_applied_and_dropped(self) -> None:
        threads = hipfile.SizeTParameter.EXECUTION_MAX_IO_THREADS
        assert hipfile.get_parameter_size_t(threads) == (OK, 0)
        assert hipfile.set_parameter_size_t(threads, 7) == OK
        assert hipfile.get_parameter_size_t(threads) == (OK, 7)
        hipfile.driver_open()
        assert hipfile.get_parameter_size_t(threads) == (OK, 7)
        hipfile.driver_close()
        assert hipfile.get_parameter_size_t(threads) == (OK, 0)

    def test_defaults(self) -> None:
        assert hipfile.get_parameter_bool(hipfile.BoolParameter.USE_PCIP2PDMA) == (OK, False)
        assert hipfile.get_parameter_string(hipfile.StringParameter.LOG_DIR) == (OK, "")
        assert hipfile.get_parameter_bool(hipfile.BoolParameter.PROPERTIES_ALLOW_COMPAT_MODE) == (OK, True)

    @pytest.mark.parametrize(
        ("call", "good", "bad"),
        [
            (hipfile.driver_set_max_direct_io_size, 128, 100),
            (hipfile.driver_set_max_cache_size, 8, 6),
            (hipfile.driver_set_max_pinned_mem_size, 8, 6),
            (lambda kib: hipfile.driver_set_poll_mode(True, kib), 8, 6),
        ],
    )
    def test_alignment(self, call: Any, good: int, bad: int) -> None:
        assert call(bad)[0] == 5022
        assert hipfile.driver_get_properties()[1].nvfs.driver_control_flags & 1 == 0, "all or nothing"
        assert call(good) == OK

    def test_unknown_numbers_and_wrong_types_are_5022(self) -> None:
        assert hipfile.get_parameter_size_t(99)[0][0] == 5022
        assert hipfile.set_parameter_bool(99, True)[0] == 5022
        assert hipfile.set_parameter_bool(0, "yes")[0] == 5022  # type: ignore[arg-type]
        assert hipfile.set_parameter_size_t(0, -1)[0] == 5022
        assert hipfile.set_parameter_string(0, 5)[0] == 5022  # type: ignore[arg-type]
        for count in (0, 129):
            assert (
                hipfile.set_parameter_size_t(hipfile.SizeTParameter.PROPERTIES_IO_BATCHSIZE, count)[0] == 5022
            )

    def test_a_log_folder_must_exist_to_be_applied(self, tmp_path: Any) -> None:
        log_dir = hipfile.StringParameter.LOG_DIR
        for folder, applied in ((tmp_path, str(tmp_path)), (tmp_path / "none", "")):
            assert hipfile.set_parameter_string(log_dir, str(folder)) == OK
            hipfile.driver_open()
            assert hipfile.get_parameter_string(log_dir) == (OK, applied)
            hipfile.driver_close()

    def test_properties_show_what_was_set(self) -> None:
        assert hipfile.driver_set_poll_mode(True, 16) == OK
        assert hipfile.driver_set_max_direct_io_size(1024) == OK
        assert hipfile.set_parameter_size_t(hipfile.SizeTParameter.PROPERTIES_IO_BATCHSIZE, 5) == OK
        hipfile.driver_open()
        error, properties = hipfile.driver_get_properties()
        assert error == OK
        assert properties is not None
        assert properties.nvfs.poll_thresh_size == 16
        assert properties.nvfs.driver_control_flags == 0b11
        assert properties.nvfs.max_direct_io_size == 1024
        assert properties.max_batch_io_count == 5
        assert hipfile.batch_io_setup(6)[0][0] == 5022

    def test_compatibility_modes_decide_routes(self, rig: Rig) -> None:
        assert hipfile.set_parameter_bool(hipfile.BoolParameter.FORCE_COMPAT_MODE, True) == OK
        handle, memory = rig.file(pattern(BLOCK)), rig.memory(BLOCK)
        _, scores = hipfile.score(handle, memory.handle, BLOCK, 0, 0)
        assert scores is not None
        assert (scores.fastpath.value, scores.fallback.value) == (-1, 1)

    def test_the_largest_direct_transfer_bounds_each_call(self, rig: Rig) -> None:
        assert hipfile.driver_set_max_direct_io_size(64) == OK
        handle, memory = rig.file(pattern(1 << 20)), rig.memory(1 << 20)
        with inject(op="read", device="sim:0", latency=0.0) as rule:
            assert hipfile.read(handle, memory.handle, 1 << 20, 0, 0) == 1 << 20
        assert rule.calls == 16
        assert STATE.count == 1
