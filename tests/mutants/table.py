"""Faults put into the sources on purpose, one at a time, and the tests that must fail then.

They hold what nothing but tests can: interrupts, forks, captures, gates, slots, fallback, evidence, edges. `run.py` puts each one into
a copy of the package and runs its tests against it; test_table.py holds in every run that the table still fits the sources.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """`old` occurs once in `file` (below src/nobounce) and becomes `new`. Each of `tests` (node ids below tests) must fail then."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTANTS = (
    # Ctrl-C
    Mutant(
        "an interrupt cuts a batch's call in two",
        "uninterrupted.py",
        "    if not scheduler.interruptible():\n",
        "    if True:\n",
        (
            "attack/test_interrupts_at_random.py::test_an_interrupt_is_keyboard_interrupt_or_comes_too_late[batch-cpu]",
        ),
    ),
    Mutant(
        "the result of an interrupted call is lost",
        "uninterrupted.py",
        "        call.give_up()\n        raise\n",
        "        raise\n",
        ("unit/test_uninterrupted.py::test_an_interrupt_ends_the_waiting_alone_and_the_result_is_undone",),
    ),
    Mutant(
        "an interrupted hold is counted out twice",
        "io/hold.py",
        "            if self._file_held:\n",
        "            if True:\n",
        (
            "attack/test_interrupted_calls.py::test_an_interrupt_at_any_step_comes_out_and_leaves_nothing_in_use[read_async-cpu]",
        ),
    ),
    Mutant(
        "an interrupted wait leaves its stream held",
        "io/transfer.py",
        "                self._engine.submit(self)  # interrupted: somebody has to open the gate\n",
        "                pass\n",
        ("unit/gpu/test_interrupts.py::test_an_interrupt_at_any_line_leaves_no_gate_closed",),
    ),
    Mutant(
        "whoever looked and was interrupted keeps gates from being told",
        "runtimes/gpu/gates.py",
        "                self._untold += mine[told:]\n",
        "                pass\n",
        ("unit/gpu/test_interrupts.py::test_an_interrupt_at_any_line_leaves_no_gate_closed",),
    ),
    Mutant(
        "at the end of the program the gates of transfers are opened too",
        "runtimes/exits.py",
        "                if not gate.promised:\n",
        "                if True:\n",
        (
            "unit/runtimes/test_exits.py::test_a_transfer_in_flight_is_waited_for_and_its_gate_opens_when_the_bytes_are_there",
        ),
    ),
    # fork
    Mutant(
        "a forked child is not told what it inherits",
        "forked.py",
        "        thing._inherited()\n",
        "        pass\n",
        ("field/test_kind_03_fork.py::test_a_child_is_told_at_once",),
    ),
    Mutant(
        "a forked child takes the parent's objects for its own",
        "reaper.py",
        "    _generation += 1\n",
        "    pass\n",
        ("field/test_kind_03_fork.py::test_a_child_is_told_at_once",),
    ),
    Mutant(
        "a forked child hands calls to threads that are not there",
        "uninterrupted.py",
        "    _threads = _Threads()\n\n\nos",
        "    pass\n\n\nos",
        ("unit/io/test_batch.py::test_a_forks_child_is_refused_and_the_parent_goes_on",),
    ),
    Mutant(
        "a forked child opens the parent's gates",
        "runtimes/gpu/gates.py",
        "            if isinstance(gate, GpuGate):\n                gate._opened = True\n",
        "            pass\n",
        ("unit/gpu/test_process.py::test_a_forked_child_opens_no_gate_of_its_parent",),
    ),
    # capture
    Mutant(
        "I/O beside a capture ends it",
        "runtimes/gpu/capture.py",
        "            self._mode = self._captures.relax()\n",
        "            self._mode = RELAXED\n",
        (
            "unit/gpu/test_capture.py::test_reads_do_not_end_it",
            "unit/gpu/test_capture.py::test_a_load_does_not_end_it",
        ),
    ),
    Mutant(
        "a caller's thread is left in the relaxed capture mode",
        "runtimes/gpu/capture.py",
        "        if mode != RELAXED:\n",
        "        if False:\n",
        ("unit/gpu/test_capture.py::test_a_caller_in_another_mode_keeps_it",),
    ),
    # gates
    Mutant(
        "a gate that is opened twice opens another one",
        "runtimes/gpu/gates.py",
        "                return  # the words may be another gate's by now\n",
        "                pass\n",
        ("unit/gpu/test_gates.py::test_closed_gates_share_no_words_however_often_an_old_one_was_opened",),
    ),
    Mutant(
        "a gate's words are used again while it is closed",
        "runtimes/gpu/gates.py",
        "                    if gate._opened:\n                        self._free.append(gate._pair)\n",
        "                    self._free.append(gate._pair)\n",
        ("unit/gpu/test_gates.py::test_words_are_not_used_again_while_their_gate_is_closed",),
    ),
    Mutant(
        "a gate closes while memory is being registered",
        "io/quiet.py",
        "            self._changed.wait_for(lambda: not self._calls)\n",
        "            pass\n",
        ("unit/io/test_pagecache_dma.py::test_a_gate_waits_for_the_registration_under_way",),
    ),
    Mutant(
        "memory is registered behind a closed gate",
        "io/quiet.py",
        "            if self._gates:\n",
        "            if False:\n",
        (
            "unit/io/test_pagecache_dma.py::test_nothing_is_registered_while_a_stream_is_held_at_a_gate",
            "unit/io/test_bounce.py::test_behind_a_gate_a_slot_is_waited_for_and_not_pinned",
        ),
    ),
    Mutant(
        "a transfer's end leaves its gate closed",
        "io/transfer.py",
        "                self._gate.open()\n",
        "                pass\n",
        ("unit/io/test_file_transfers.py::test_a_stream_goes_on_behind_a_transfer_however_that_ends",),
    ),
    Mutant(
        "a host function does not hold its stream",
        "runtimes/gpu/gates.py",
        "                gate.wait()\n",
        "                pass\n",
        ("unit/gpu/test_gates.py::test_a_host_function_holds_its_stream_until_the_gate_is_opened",),
    ),
    # slots
    Mutant(
        "who need not wait takes the slot of one who must",
        "io/movers/bounce.py",
        "len(self._free) > (0 if wait else self.wanted)",
        "len(self._free) > 0",
        ("unit/io/test_bounce.py::test_who_need_not_wait_leaves_a_slot_to_who_must",),
    ),
    Mutant(
        "a slot is given back while a failed copy may still read it",
        "io/movers/fallback.py",
        "                self._quiesce()\n                ring.release(slot)\n",
        "                ring.release(slot)\n",
        ("unit/io/test_relay.py::test_the_slot_of_a_copy_that_no_event_tells_of_goes_back_when_it_is_done",),
    ),
    Mutant(
        "a slot that could not be pinned counts for good",
        "io/movers/bounce.py",
        "                    self._made -= 1\n",
        "                    pass\n",
        ("unit/io/test_bounce.py::test_slots_that_a_failing_device_did_not_make_are_not_counted",),
    ),
    Mutant(
        "slots are made while a stream is held",
        "io/movers/bounce.py",
        "        return None if quiet is not None and self._made else _nothing\n",
        "        return _nothing\n",
        ("unit/io/test_bounce.py::test_behind_a_gate_a_slot_is_waited_for_and_not_pinned",),
    ),
    # fallback
    Mutant(
        "every error of the direct path is repeated by fallback",
        "io/worker.py",
        "        if code in self._target.retry_errnos:\n",
        "        if True:\n",
        ("unit/io/test_file_transfers.py::test_an_error_carries_everything_and_what_had_moved",),
    ),
    Mutant(
        "fallback repeats a failed direct try in another place",
        "io/worker.py",
        "        at = chunk.file_offset + done, chunk.buffer_offset + done\n",
        "        at = chunk.file_offset + done, chunk.buffer_offset\n",
        ("unit/io/test_file_transfers.py::test_a_direct_try_that_fails_half_way_is_finished_in_its_place",),
    ),
    Mutant(
        "a short direct transfer goes on from an unaligned place",
        "io/movers/fastpath.py",
        "            done -= done % target.align\n",
        "            pass\n",
        ("unit/io/test_file_transfers.py::test_C58_C59_short_direct_reads_go_on_from_an_aligned_place",),
    ),
    Mutant(
        "HIPFILE_ALLOW_COMPAT_MODE=false lets bytes bounce",
        "route/judge.py",
        " or not request.settings.allow_compat_mode\n",
        "\n",
        (
            "unit/route/test_judge.py::test_without_compat_mode_an_unaligned_edge_is_refused",
            "unit/route/test_judge.py::test_without_compat_mode_there_is_no_page_cache_route",
        ),
    ),
    # evidence
    Mutant(
        "a page cache that could not be counted proves directness",
        "io/job.py",
        "        if self._grew is not False:\n",
        "        if self._grew:\n",
        (
            "unit/io/test_file_transfers.py::test_evidence_is_not_kernel_where_the_page_cache_can_only_be_sampled",
        ),
    ),
    Mutant(
        "bytes that the page cache served are reported as direct",
        "io/job.py",
        "        return served_by_cache(t.buffered_fd, t.direct_fd, ranges, t.align)\n",
        "        return []\n",
        ("field/test_truth_1_each_range_answers_for_itself.py::test_what_counters_deny_is_fallback",),
    ),
    Mutant(
        "a denied claim does not raise where fastpath is required",
        "io/job.py",
        "            elif self._denied and self.target.only_direct:\n",
        "            elif False:\n",
        (
            "field/test_truth_1_each_range_answers_for_itself.py::test_what_counters_deny_is_an_error_where_fastpath_is_required",
        ),
    ),
    Mutant(
        "a sum of receipts has the evidence of its best part",
        "io/receipt.py",
        "        evidence=min(direct,",
        "        evidence=max(direct,",
        ("unit/io/test_receipt.py::test_a_sum_has_the_weakest_evidence_of_those_with_direct_bytes",),
    ),
    # edges
    Mutant(
        "buffered and direct bytes of a write share a page",
        "route/judge.py",
        '    grain = max(offset, PAGE) if request.op == "write" else offset\n',
        "    grain = offset\n",
        ("unit/route/test_judge.py::test_buffered_and_direct_bytes_of_a_write_never_share_a_page",),
    ),
    Mutant(
        "a direct run may begin at unaligned memory",
        "route/judge.py",
        "    target = residue if mem > grain else 0\n",
        "    target = 0\n",
        ("unit/route/test_judge.py::test_segments_cover_the_request_once_and_direct_ones_are_aligned",),
    ),
    Mutant(
        "a receipt counts bytes behind a gap",
        "io/job.py",
        "            if s.file_offset != position:\n",
        "            if False:\n",
        ("unit/io/test_file_transfers.py::test_a_receipt_counts_no_bytes_behind_the_ones_that_failed",),
    ),
    Mutant(
        'a read with cache="avoid" leaves its pages',
        "io/job.py",
        '        if any(c.backend == "fallback" for c in self._chunks):\n',
        "        if False:\n",
        ("unit/io/test_file_transfers.py::test_cache_avoid_leaves_no_page_behind",),
    ),
    # what is lost without a word
    Mutant(
        "bytes that a short read did not bring are written",
        "transferend.py",
        "        short = bool(self._homes) and moved < asked\n",
        "        short = False\n",
        ("field/test_nothing_lost_2_undefined_bytes.py::test_a_short_read_leaves_the_rest_undefined",),
    ),
    Mutant(
        "a file that changes while it is loaded is not noticed",
        "formats/opened.py",
        "        try:\n            self._check()\n        finally:\n            self.file.close()\n",
        "        self.file.close()\n",
        ("integration/test_load.py::test_a_file_written_to_while_it_is_read_is_an_error",),
    ),
    Mutant(
        "a file is written through another user's link",
        "outfile.py",
        '            self._need_trusted(status, "link")\n',
        "",
        ("unit/test_outfile.py::test_a_link_of_another_user_is_refused",),
    ),
    Mutant(
        "tensors of a long header may overlap",
        "formats/covering.py",
        "    if below.size:\n",
        "    if False:\n",
        (
            "unit/formats/test_formats_columns.py"
            "::test_ranges_of_a_header_of_any_length_are_refused_in_the_same_words",
        ),
    ),
    Mutant(
        "requests of a batch share bytes of a bounce slot",
        "io/batch/threads.py",
        "            at += -(-item.nbytes // GRAIN) * GRAIN\n",
        "            at += GRAIN\n",
        ("unit/io/test_batch.py::test_small_relayed_requests_share_bounce_slots_and_copies",),
    ),
    # saved models
    Mutant(
        "names that share memory are saved apart",
        "formats/sources.py",
        "        _check_shared(found)\n",
        "        pass\n",
        ("unit/formats/test_save_set.py::test_a_set_needs_a_tensor_and_a_folder",),
    ),
    Mutant(
        "bytes that a failed read left undefined are saved",
        "formats/sources.py",
        "        if lacks is not None:\n",
        "        if False:\n",
        ("unit/formats/test_save.py::test_bytes_that_a_failed_read_left_undefined_are_not_saved[True]",),
    ),
    Mutant(
        "a strided array's rows are cut in the wrong place",
        "formats/sources.py",
        "        rows = 1 if inside else max(1, (last - at) // row)\n",
        "        rows = max(1, (last - at) // row)\n",
        ("unit/formats/test_save.py::test_large_arrays_in_another_order_are_brought_into_it_piece_by_piece",),
    ),
    Mutant(
        "tensors are misaligned for their types",
        "formats/layout.py",
        "-s.itemsize if s.nbytes % ALIGN else 0",
        "s.itemsize if s.nbytes % ALIGN else 0",
        ("unit/formats/test_save.py::test_data_begins_on_a_page_and_no_element_is_misaligned",),
    ),
    Mutant(
        "old shards go before the index names the new ones",
        "formats/saveset.py",
        "        receipts: list[Receipt] = []\n",
        "        receipts: list[Receipt] = []\n        _remove(where, list(_named_by(index_path)))\n",
        ("unit/formats/test_save_set.py::test_while_a_set_is_written_the_index_names_the_old_one",),
    ),
    Mutant(
        "an old index has other files than shards removed",
        "formats/saveset.py",
        ' and name.endswith(".safetensors")}',
        "}",
        ("unit/formats/test_save_set.py::test_a_set_replaces_the_old_one_and_nothing_else",),
    ),
    Mutant(
        "an index that is a link leads out of the folder",
        "formats/saveset.py",
        "        _refuse_link(where, index_path)\n",
        "",
        ("unit/formats/test_save_set.py::test_an_index_that_is_a_link_is_refused",),
    ),
    Mutant(
        "memory is said to be free before it is written",
        "formats/staging.py",
        "        if not self._left:\n            self._freed()\n        return staged[::-1]\n",
        "        self._freed()\n        return staged[::-1]\n",
        ("unit/formats/test_save_async.py::test_memory_may_be_written_once_it_is_staged[cpu-0-file]",),
    ),
    Mutant(
        "what device memory is hashed is not what is written",
        "formats/filewriter.py",
        "            stream.sync()\n            each(file_offset + start, here.view())\n",
        "            each(file_offset + start, bytes(len(here)))\n",
        ("cli/test_verify.py::test_a_changed_byte_is_found_in_its_block_and_tensors[sim:0]",),
    ),
    Mutant(
        "a changed header is not found",
        "formats/checksums.py",
        "    return digest(before_data) == recorded.digest\n",
        "    return True\n",
        ("cli/test_verify.py::test_a_changed_header_is_found",),
    ),
    Mutant(
        "a model that changes while it is converted is not noticed",
        "formats/savefile.py",
        "            hooks.check()\n",
        "            pass\n",
        ("cli/test_convert.py::test_a_source_that_changes_meanwhile_is_told_and_nothing_is_written",),
    ),
    # the caller's own thread, and the kernel's
    Mutant(
        "a spread read gives its slots back while the kernel still writes into them",
        "io/movers/spread.py",
        "        self.by.close()\n        if self.in_doubt:\n",
        "        if self.in_doubt:\n",
        ("unit/io/test_spread.py::test_no_slot_goes_back_while_the_kernel_may_write_into_it",),
    ),
    Mutant(
        "an interrupt of the giving back leaves slots behind",
        "io/movers/spread.py",
        "                interrupt = interrupt or e\n",
        "                raise\n",
        ("unit/io/test_spread.py::test_an_interrupt_while_everything_is_given_back_comes_after_that",),
    ),
    Mutant(
        "a short spread read is taken for a whole one",
        "io/movers/spread.py",
        "        if found != (n, min(self._cut.piece, self._what.nbytes - n * self._cut.piece)):\n",
        "        if False:\n",
        ("unit/io/test_spread.py::test_what_ends_with_the_file_is_read_in_full_by_the_whole_way",),
    ),
    Mutant(
        "a slot is read into before what it held is copied",
        "io/movers/spread.py",
        "        self.room = len(self._places)\n",
        "        self.room = 1 << 30\n",
        ("unit/io/test_spread.py::test_more_than_the_slots_hold_goes_through_them_in_turns[2]",),
    ),
    Mutant(
        "lost pages of a small write are asked for twice",
        "io/oncaller.py",
        "    if error is not None:\n        raise error\n",
        "    if error is not None:\n        return None\n",
        ("unit/io/test_small_writes.py::test_a_disk_that_cannot_keep_the_data_is_reported_once_asked[cpu]",),
    ),
    Mutant(
        "a batch in a stream is not ended where it is cancelled",
        "io/batch/instream.py",
        "            for hold in self._holds:\n                hold.let_go()\n",
        "            pass\n",
        (
            "unit/io/test_batch_in_stream.py::test_cancelled_before_the_stream_gets_there_nothing_moves_and_everything_is_let_go[cpu]",
        ),
    ),
    Mutant(
        "an error of a batch in a stream is nobody's",
        "io/batch/instream.py",
        "            self.error = first\n",
        "            pass\n",
        (
            "unit/io/test_batch_in_stream.py::test_a_failure_that_nobody_asked_about_is_the_stream_s_to_raise[cpu]",
        ),
    ),
    Mutant(
        "gathered writes run beside those of the page cache",
        "io/batch/lanes.py",
        "            direct |= self._gathering().takes(group, slots)[0]  # past the page cache, if not past the host\n",
        "            pass\n",
        (
            "unit/io/test_gathered_writes.py::test_unaligned_ones_and_those_of_the_page_cache_go_by_threads_and_spoil_no_neighbour[ring]",
        ),
    ),
    Mutant(
        "a window is written before its bytes have come",
        "io/batch/relays.py",
        "            self._slots.calls.sync(oldest.slot[1])\n        except DeviceError as e:\n            return ended + self._failed(e)\n",
        "            pass\n        except DeviceError as e:\n            return ended + self._failed(e)\n",
        (
            "unit/io/test_gathered_writes.py::test_every_block_lands_where_it_belongs_and_leaves_no_page[ring-True]",
        ),
    ),
    Mutant(
        "a short gathered write counts as whole",
        "io/batch/ends.py",
        '        part = self._gathered_in_part if group.op == "read" else self._written_in_part\n',
        "        part = self._gathered_in_part\n",
        (
            "unit/io/test_gathered_writes.py::test_a_write_that_stops_short_at_the_end_of_the_file_is_not_taken_for_its_end[ring]",
        ),
    ),
    # blocks under keys
    Mutant(
        "a reader takes what the writer puts into a slot before it is locked",
        "kv/getting.py",
        "        slots[moved] = -1\n",
        "        pass\n",
        ("unit/kv/test_block_store.py::test_a_reader_looks_again_once_it_holds_the_slots",),
    ),
    Mutant(
        "a reader's pins are its own secret",
        "kv/pins.py",
        "self._lock_each(fresh, fcntl.F_RDLCK)",
        "[]",
        ("unit/kv/test_block_store.py::test_a_reader_s_pins_hold_the_writer_off",),
    ),
    Mutant(
        "a free slot is written to while it is read",
        "kv/slots.py",
        "(passed if self._pins.count(slot) else some).append(slot)",
        "some.append(slot)",
        (
            "unit/kv/test_block_store.py::test_a_slot_that_is_read_is_not_written_to_once_its_key_has_a_newer_block",
        ),
    ),
    Mutant(
        "an evicted block's entry stays",
        "kv/slots.py",
        "            self._table.clear(slots)\n",
        "",
        ("unit/kv/test_block_store.py::test_the_least_recently_used_go",),
    ),
    Mutant(
        "an entry counts in another's place",
        "kv/table.py",
        ' & (fresh["slot"] == changed.astype(np.uint64))',
        "",
        ("unit/kv/test_block_store.py::test_an_entry_in_the_place_of_another_reads_as_absent",),
    ),
    Mutant(
        "checksums of blocks are not looked at",
        "kv/moves.py",
        "checked & (self._sums(staging, count) != sums)",
        "checked & False",
        ("unit/kv/test_block_store.py::test_a_damaged_block_is_named_and_can_be_put_again",),
    ),
)
