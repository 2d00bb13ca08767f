"""What a tired engineer might leave out, or get wrong by one; and the test that would notice, the quickest that does.

Each text below is a table:

    tests/file.py::test             the test that must fail: a file, or one test of it
    ::test                          another test of the same file
        what goes wrong             the mutant's name
            found => replacement    the replacement may be empty, and either may take several lines

What is found stands in the product once, whatever the whitespace between its words and signs. In which file, the runner
finds out.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str  # what goes wrong
    find: str
    replace: str
    test: str


ENTRY = re.compile(r"^(\S.*)|^ {4}(\S.*)\n((?: {8}.*\n)+)", re.MULTILINE)  # a test, or a name and its change


def mutants_of(table: str) -> Iterator[Mutant]:
    test = ""
    for named, name, change in ENTRY.findall(table):
        if named:
            test = test.partition("::")[0] + named if named.startswith("::") else named
        else:
            find, replace = re.sub("^ {8}", "", change, flags=re.MULTILINE).split("=>")
            yield Mutant(name, find.strip(), replace.strip(), test)


PROTOCOL = """\
tests/protocol/test_session.py::test_repeated_and_missing_frames_are_refused_with_both_numbers
    a frame that repeats or skips a number is taken
        envelope.sequence != self._num_received => False
::test_a_frame_of_another_incarnation_is_refused_by_both_ends
    a frame of another incarnation is taken
        now not in (0, incarnation) and => False and
::test_frames_without_incarnation_are_accepted_only_before_the_welcome
    a frame without incarnation is taken for good
        self._peer_knows_incarnation |= incarnation != 0 and => self._peer_knows_incarnation |= False and
tests/protocol/test_order.py::test_what_is_out_of_order_is_refused_with_both_numbers
    one step more than the depth may be announced
        plan - oldest <= self.depth => plan - oldest <= self.depth + 1
    a step is done before its victims are home
        require(oldest.victims.complete, => require(True,
    rows may come in any order
        require(span.start == here, => require(True,
tests/protocol/test_order.py::test_an_impossible_message_is_refused_by_both_ends_with_what_is_wrong
    an array may end outside its block
        spec.offset + nbytes > arrays_bytes => spec.offset > arrays_bytes
tests/test_packing.py
    the last span of bytes is as long as the others
        nbytes=min(max_payload, nbytes - offset) => nbytes=max_payload
    a piece may have more rows than staging
        (limit - offset) // width => (max_payload - offset) // width
    a later piece begins with the array's first bytes
        source[first - spec.offset : last - spec.offset] => source[: last - first]
tests/protocol/test_ring.py::test_any_payload_and_any_two_fit_once_everything_is_released
    a ring is full one byte early
        end - self._released > self.capacity => end - self._released >= self.capacity
::test_pieces_finish_in_any_order_and_space_is_released_in_order
    pieces that were read out of order stay in the ring
        while self._open and self._open[0].done: => if self._open and self._open[0].done:
::test_a_torn_guard_is_noticed_when_viewed_and_when_done
    bytes that were torn while they were read pass
        self._check_guards(piece.ref, piece.stamp) => pass
::test_a_changed_payload_is_noticed_by_its_checksum
    the checksum of a piece is not compared
        (digest := xxhash.xxh3_64_intdigest(payload.data)) != ref.checksum => (digest := 0)
tests/protocol/test_ring.py::test_a_message_comes_with_exactly_the_bytes_that_it_announces
    a message may come with fewer bytes than it announces
        if arrived != expected: => if arrived > expected:
    a broken message is passed over
        self._num_refused += 1 raise
        => self._num_refused += 1
                    return True
tests/system/test_peers.py::test_a_peer_that_ticks_slowly_is_still_found_silent
    the peer's silence has no end
        silent_s <= self._silence_timeout_s => True
::test_silence_while_this_process_was_stopped_is_not_held_against_the_peer
    a pause of this process is held against the peer
        self._listening_since_s = self._last_change_s = now_s => pass
::test_a_note_of_a_failure_counts_on_this_host_and_after_the_reader_began
    a failure from before the reader began ends it
        note.boot_id == boot_id() and note.at_s >= since_s => note.boot_id == boot_id()
    a failure on another host ends the reader
        note.boot_id == boot_id() and note.at_s >= since_s => note.at_s >= since_s
::test_a_failure_that_is_not_a_process_s_own_is_not_noted
    the peer's own failure is noted as one of this process
        if not is_own or (isinstance(error, RowcastError) and error.is_peers): => if not is_own:
::test_a_failure_from_before_a_process_was_started_does_not_end_it
    a process leaves the note of an earlier failure
        failure_path(self.path, self._role).unlink(missing_ok=True) => pass
::test_a_second_process_of_a_role_is_refused_and_the_first_goes_on
    two processes of a role hold a run directory
        if not try_lock(self._lock, self.path / f"{self._role}.lock"): => if False:
tests/protocol/test_zmq_link.py::test_a_queue_beyond_all_credits_is_refused
    frames that wait to be sent have no bound
        len(self._outbox) >= QUEUE_FRAMES => False
tests/protocol/test_ring_file.py::test_a_ring_of_another_size_is_refused_with_both_sizes
    a ring of another size is attached
        or status.st_size != nbytes => or False
tests/checkpoints/test_faults.py::test_a_disk_that_takes_only_a_part_of_each_write_still_gets_everything
    what a disk took only a part of is not written again
        rest = rest[os.write(self._descriptor, rest) :]
        => rest = rest[max(len(rest), os.write(self._descriptor, rest)) :]
::test_a_file_that_is_written_durably_is_the_old_one_or_the_new_one
    a file is renamed before it is on the disk
        file.write(content) file.sync() => file.write(content)
tests/checkpoints/test_damage.py::test_a_flipped_bit_anywhere_in_the_manifest_is_refused
    the checksum of a manifest is not compared
        if checksum != sealed.checksum: => if not checksum:
tests/readers/test_schedule.py::test_going_on_from_any_position_gives_the_same_rest
    a position forgets how far its epoch is
        train_batch=at.train_batch + 1 => train_batch=at.train_batch
tests/test_learning_rate.py
    the learning rate is that of the step before
        settings.schedule, train_step + 1 => settings.schedule, train_step
tests/hostile/test_peers.py::test_a_value_one_beyond_its_range_is_refused[slots]
    a slot one beyond the cache passes
        slots: Annotated[A | None, ArrayLayout("i4", (N,), below=READABLE, where=is_arranged)]
        => slots: Annotated[A | None, ArrayLayout("i4", (N,), below=READABLE + 1, where=is_arranged)]
::test_a_value_one_beyond_its_range_is_refused[bag_order]
    a bag one beyond the last passes
        below=G => below=G + 1
::test_a_trainer_ends_with_a_sentence_when_its_prefetcher_sends[an update twice]
    a row may be updated twice in a step
        (U,), below=READABLE, distinct=in_one_source => (U,), below=READABLE
::test_a_trainer_with_weighted_bags_ends_with_a_sentence_when_its_prefetcher_sends
    weights of look-ups travel as integers
        ArrayLayout("f4", (N,), where=is_present("weights")) => ArrayLayout("i4", (N,), where=is_present("weights"))
tests/recovery/test_rejoin.py::test_nobody_is_awaited_where_the_job_does_not_say_so
    a peer that is lost is awaited although the job does not say so
        if isinstance(error, PeerNeverCame) or not self._rejoin_s: => if isinstance(error, PeerNeverCame):
::test_a_peer_that_never_came_is_not_awaited_longer_than_a_user_said
    a second peer is awaited as long as the first
        msgspec.structs.replace(self.transport, connect_timeout=self._rejoin_s) => self.transport
    a peer that was lost once counts as never lost
        self._waits_again = True => pass
::test_tables_in_files_and_a_conversation_over_tcp_go_on_too[prefetcher]
    a second attempt has the threads of the first
        self._crew = Crew(self._role, self._signals.bell) => pass
"""

PREFETCHER = """\
tests/stores/test_redis_failures.py::test_a_row_that_another_program_writes_over
    redis: a row is taken from whatever is in its field
        if whole_pages(found, found.view(np.int32), self._constants, identities) == len(keys): => if True:
    redis: a value's checksum does not say which write wrote it
        (mix(self._seed + places.astype(np.uint64) * GOLDEN) + keys.view(np.uint64)) => keys.copy()
::test_a_server_that_never_answers_gets_one_connection_and_one_first_command
    redis: a command is sent again when no answer comes
        Retry(NoBackoff(), 0) => Retry(NoBackoff(), 2)
::test_a_server_that_is_stopped_counts_as_lost_after_one_timeout_and_is_asked_nothing_more
    redis: rows are written after a server was lost
        self._lost = self._lost or error => self._lost = None
::test_a_server_that_started_again_is_noticed_before_a_row_is_missed
    redis: a server that was started again is taken for the same
        if info.get("run_id") != node.run_id: => if False:
::test_a_server_that_may_evict_is_refused
    redis: a server that may evict is taken
        if policy != "noeviction": => if False:
::test_a_server_that_repeats_the_password_in_an_error_is_not_quoted
    redis: an error repeats the password
        words = words.replace(self._password, "***") => pass
tests/stores/test_redis_rows.py::test_rows_come_back_as_a_dictionary_has_them
    redis: a freed row is deleted while a reader holds it
        oldest = min(self._holds, default=self._num_holds) => oldest = self._num_holds
    redis: rows lose the zero bytes at their end
        rows.view(f"V{rows[0].nbytes}") => rows.view(f"S{rows[0].nbytes}")
::test_a_copy_of_a_run_leaves_the_rows_of_the_original_alone
    redis: a copy of a run deletes the rows of the original
        if earlier is None or earlier.folder != folder.st_ino: => if earlier is None:
::test_a_copy_of_a_whole_disk_leaves_the_rows_of_the_original_alone
    redis: a copy of a disk deletes the rows of the original
        earlier.machine not in (None, machine_of(folder)) => False
::test_closing_deletes_the_keys_of_its_rows_and_no_others
    redis: closing deletes every run's rows
        rowcast:{{{tag:02x}}}{generation}".encode() => rowcast:{{{tag:02x}}}{generation[:0]}".encode()
::test_the_next_process_deletes_what_a_killed_one_left
    redis: rows that a killed process left stay
        if earlier.server != server: => if True:
tests/system/test_device_order.py::test_every_order_that_the_waits_allow_gives_the_bits_of_the_plain_loop[60]
    the model state is read from the ring before the rows that were sent first
        is_next = self._dense and not self._writeback.has_arrived => is_next = self._dense
tests/planner/test_planner.py::test_a_plan_waits_until_its_horizon_is_complete
    the horizon is a batch short
        num_beyond >= self.num_ahead and => num_beyond >= self.num_ahead - 1 and
tests/planner/test_plans.py::test_plans_and_barriers_equal_brute_force_field_by_field
    a row that came home at a barrier stays dirty
        row["use"] &= ~DIRTY => pass
    victims before a barrier count as under way
        self._write_backs.settle(self._last_planned) => pass
    training does not make a row dirty
        (DIRTY if train else 0) => 0
    a row loses its dirty flag on the way to its next use
        target["slot"], target["use"] = source["slot"], source["use"]
        => target["slot"], target["use"] = source["slot"], source["use"] & ~DIRTY
    rows that the next step needs are evicted first
        at, size = (rows.last_step - s) & (heads.shape[1] - 1), 0
        => at, size = (rows.step + 1 + s) & (heads.shape[1] - 1), 0
    a slot is filled before its victim's last use
        int(left.last_uses.max(initial=NONE)) => int(left.last_uses[0]) if count else NONE
    victims are chosen in the order of the line, not by score
        sort_pairs(scores[:count], order) => pass
    a row forgets that it left dirty
        rows.step << FLAG_BITS if row["use"] & DIRTY else UNUSED => UNUSED
    victims of a step are in the order of their choice
        sort_pairs(by_key, which) => pass
    a policy that does not look ahead knows later batches
        horizon if EVICTION_POLICIES[policy].looks_ahead else 0 => horizon
    a row lies in its neighbour's slot
        unique_slots[u] = row["slot"] => unique_slots[u] = rows[(position + u + 1) & last]["slot"]
    a victim of the oldest plan under way counts as home
        max(plan - self._depth, 0 if => max(plan - self._depth + 1, 0 if
tests/planner/test_parts.py::test_the_rows_used_longest_ago_leave_first_whatever_part_they_are_in
    a queue's youngest rows leave first
        row["use"] >> FLAG_BITS <= last_use => row["use"] >> FLAG_BITS >= last_use
::test_plans_and_barriers_are_the_same_for_any_number_of_parts
    victims of parts are joined part by part, not dirty ones first
        [part.keys[: part.num_dirty] for part in left] + [part.keys[part.num_dirty :] for part in left]
        => [part.keys for part in left]
tests/stores/test_stores.py
    every thread reads the first rows of a piece
        gather(self.words, rows[slice(*own)], words[slice(*own)])
        => gather(self.words, rows[: own[1] - own[0]], words[slice(*own)])
    every thread numbers the first rows of a piece
        self._find(keys[slice(*own)], numbers[slice(*own)]) => self._find(keys[slice(*own)], numbers[: own[1] - own[0]])
::test_any_reads_and_writes_agree_with_a_plain_dictionary
    a row that was written counts as absent
        index[keys[i] + shifts[keys[i] >> KEY_SHIFT]] = count => count
    tables of a group share their rows
        self.shifts[table] = first - (table << KEY_SHIFT) => self.shifts[table] = -(table << KEY_SHIFT)
tests/hostile/test_peers.py::test_a_trainer_ends_with_a_sentence_when_its_prefetcher_sends[a look-up twice]
    an order that names a look-up twice passes
        if num_marked != size: => if False:
tests/readers/test_draws.py
    every batch draws the same negatives
        (seed, int(is_eval), 0 if is_eval else epoch, batch) => (seed, int(is_eval), 0 if is_eval else epoch)
    log-uniform draws an id beyond the last
        (chance * point < np.uint64(2**63)) & (ids < n) => (chance * point < np.uint64(2**63)) & (ids <= n)
tests/serving/test_versions.py::test_every_row_has_the_bits_of_the_checkpoint_in_every_version
    new rows of a version share places with the next ones
        self._first_new += count return out => return out
tests/planner/test_grouping.py::test_tracking_moving_and_forgetting_in_any_order_finds_exactly_what_is_tracked
    a search ends at the hole that a forgotten row left
        if ((cell - begin) & mask) >= ((cell - hole) & mask): => if ((cell - begin) & mask) > ((cell - hole) & mask):
tests/planner/test_plans.py::test_the_known_batches_stay_within_the_budget
    the horizon grows beyond its bytes
        proposed * known.id_bytes <= self._budget_bytes * known.num_batches => known.id_bytes <= self._budget_bytes
::test_a_horizon_counts_batches_and_as_many_plans_as_are_in_flight
    a horizon counts the batches of the next plan
        self.num_batches - len(self._known[0].steps) => self.num_batches
    fewer plans than the depth are known
        and len(self._known) > self.least_plans => and len(self._known) > 0
tests/planner/test_tier.py::test_the_horizon_grows_until_the_tier_has_nothing_to_guess_either
    the horizon ends where the device has nothing to guess
        [group for level in self.levels for group in level.groups] => self.levels[0].groups
tests/system/test_store_hints.py
    a store is not told of plans
        store.store.stage(plan.plan, group) => pass
    rows are said to be home once they were sent
        home_through = self.writeback.applied_through => home_through = self.fetcher.sent_through
tests/system/test_bundles.py::test_a_plan_ends_before_a_fault
    a plan serves steps from a fault on
        num_steps = min(len(bundle.steps), self.due.step_after - self.due.next_step) => num_steps = len(bundle.steps)
::test_checkpoints_are_made_where_they_are_without_bundles
    a plan goes on over a checkpoint
        before.kind != following.kind or is_due(self.checkpoint_every, before, following)
        => before.kind != following.kind
::test_plans_of_several_steps_train_as_the_plain_loop
    each step of a plan gets the slots of the plan's first rows
        slots = device.unique_slots[places] => slots = device.unique_slots[: len(device.unique_slots[places])]
tests/system/test_ahead.py::test_the_planner_stays_within_twice_the_depth_and_two_of_the_last_step_done
    a plan is made a step too early
        return 2 * depth + 2 => return 2 * depth + 3
::test_with_the_trainer_held_before_a_step_exactly_the_next_depth_steps_arrive
    a step is sent a credit early
        oldest = self._limits.before(plan.plan) => oldest = self._limits.before(plan.plan) - 1
::test_a_barrier_waits_for_rows_that_were_sent_home_but_are_not_in_the_store
    a barrier does not wait for rows on their way home
        and reached(self._writeback.applied_through, after) =>
tests/system/test_early_end.py::test_a_run_killed_at_any_time_ends_after_the_same_step_with_the_same_best_checkpoint[1-1]
    a stop goes on a step late
        self._position_after.get(next_step - 1) => self._position_after.get(next_step)
    steps that the trainer passes over count as trained
        return barrier if self.early_end is None else barrier.cut(*self.early_end) => return barrier
tests/system/test_exact.py::test_every_way_to_train_gives_the_bits_of_the_plain_loop[adagrad-multi-2]
    rows are read before their victims are home
        needed = max(needed, plan.after_plan) => needed = min(needed, plan.after_plan)
    a piece is announced before the store has read it
        self.tickets = [ticket for ticket in self.tickets if not ticket.done()] return not self.tickets
        => [ticket.done() for ticket in self.tickets]
                return True
    rows count as home before the store has written them
        return self.arrived_last and self.tickets_open == 0 => return self.arrived_last
::test_every_way_to_train_gives_the_bits_of_the_plain_loop[sgd-single-2]
    a barrier's number counts one less
        self.applied_barriers = expected.barrier + 1 => self.applied_barriers = expected.barrier
tests/simulation/test_lives.py::test_every_life_ends_with_the_bits_of_the_plain_loop[0]
    the end is told before the last checkpoint is on disk
        self._barrier.last and self._checkpointer.busy => False
    a checkpoint begins while the one before is being written
        not self._checkpointer.busy and self._open_flush() => self._open_flush()
    the dense side is handed on, and rows are frozen, before they are home
        self.state is not PrefetcherState.SAVING or not => not
tests/system/test_barrier_states.py::test_a_run_with_small_rings_and_barriers_of_both_kinds_takes_every_row
    a barrier does not wait until its rows are home
        return home and not self._fetch_ring.used_bytes => return not self._fetch_ring.used_bytes
    every barrier needs a checkpoint
        (S.RETURNING, E.NO_CHECKPOINT, S.CLOSING), =>
tests/system/test_tight.py::test_plans_larger_than_the_ring_pass_a_cache_of_one_batch_with_a_late_store
    a later piece of rows is written to the first rows' keys
        expected.keys[span.group][span.start : span.start + span.count] => expected.keys[span.group][: span.count]
tests/stores/test_frozen_rows.py::test_any_writes_settlings_and_forgettings_agree_with_a_dictionary_and_a_set
    a checkpoint's rows come in the order of their hashes
        found.sort() =>
::test_any_writes_settlings_and_forgettings_agree_with_a_dictionary_and_a_set
    a row that was written is not marked as changed
        set_bits(self.changed_bits, numbers) => pass
    an absent row keeps the bytes that lay there
        self._store.fill_first(self._keys[absent], np.asarray(absent), self._out) => pass
    a forgotten row keeps its values
        finish(self.store.write(own, records)) => pass
    a forgotten row has still changed
        clear_bits(self.changed_bits, self.numbers.of(keys)) => pass
    a search for changed rows looks at the bits of other rows
        number != ABSENT and bits[number >> 6] >> np.uint64(number & 63)
        => number != ABSENT and bits[at >> 6] >> np.uint64(at & 63)
tests/stores/test_row_loops.py::test_a_fence_follows_the_last_store_past_the_caches
    rows that passed the caches are reported before they are seen
        new, i * width + word, width - word) end_stores() => new, i * width + word, width - word)
    rows that were read past the caches are reported before they are seen
        flat, row * width + word, LINE_WORDS) end_stores() => flat, row * width + word, LINE_WORDS)
tests/stores/test_stored_rows.py::test_a_row_that_is_passed_over_and_the_rest_of_a_line_stay_as_they_were
    a row's last line takes the next record's first words
        width - word) => LINE_WORDS)
tests/stores/test_shared_rows.py::test_a_write_begins_all_its_parts_while_a_read_holds_its_own
    a write waits for a read's parts
        ThreadPoolExecutor(CALLERS * (num_threads - 1), name) => ThreadPoolExecutor(num_threads - 1, name)
::test_rows_that_come_back_are_checked_by_all_threads
    one thread looks at all rows that come back
        first_fault(self._finite, rows, self._pool) => first_fault(self._finite, rows, type(self._pool)())
tests/test_machine.py::test_maps_that_hold_rows_are_counted_once
    a map beside the rows counts
        begin < int(end, 16) and => begin <= int(end, 16) and
tests/stores/test_shared_rows.py::test_rows_that_come_back_are_checked_by_all_threads
    rows that came back are not counted
        with self.all_stores.counted(found): => if True:
tests/stores/test_elements.py::test_any_number_of_threads_names_the_first_row_that_is_not_finite
    a thread without a fault hides another's
        faulty = min( => faulty = max(
tests/stores/test_stored_rows.py::test_only_long_records_begin_at_a_cache_line
    short records are padded too
        aligned(record_bytes, LINE_BYTES) if record_bytes > LEAST_LINES * LINE_BYTES else record_bytes
        => aligned(record_bytes, LINE_BYTES)
tests/stores/test_tiered.py
    rows that were written while they loaded get their older bytes
        states[slots[i]] = CLEAN else: slots[i] = ABSENT => states[slots[i]] = CLEAN
tests/readers/test_workers.py::test_what_is_kept_is_never_overwritten
    a segment is written while an array of the planner uses it
        weakref.finalize(lease, self._freed.append, head.segment).atexit = False => self._freed.append(head.segment)
tests/stores/test_touched_rows.py::test_rows_whose_cells_are_alike_are_told_apart
    rows whose cells are alike have buckets side by side
        size = REACH << int(self._layout.implied) => size = REACH
::test_rows_keep_the_numbers_in_which_they_were_first_added
    buckets that grow leave a row behind
        for i in range(moved): => for i in range(moved - 1):
::test_rows_that_are_added_beside_the_frontier_of_a_growth_are_found_again
    a row lies across the frontier of a growth
        or is_full(cells, sizes[FRONTIER] - 1) =>
::test_rows_keep_their_numbers_at_every_frontier_of_a_growth
    the frontier of a growth stops behind a full bucket
        while start > 0 and is_full(cells, start - 1): => while False:
::test_keys_are_found_while_rows_are_added
    a row that moves while keys are sought is found twice
        low >> HIGH <= hashed >> HIGH <= high >> HIGH => True
::test_a_cell_leads_back_to_its_row_wherever_it_lies_within_reach
    a row that lies after its own bucket gets another row's key
        return hashed if bucket_in(hashed, size) <= bucket else hashed - (ONE << top) => return hashed
tests/stores/test_tiered.py::test_a_row_that_is_loading_comes_once_it_is_loaded
    a row is read while its bytes are on their way
        elif states[slot] == LOADING: => elif False:
::test_a_write_wins_over_a_load_under_way
    a load undoes a write that came meanwhile
        if states[slots[i]] == LOADING: states[slots[i]] = CLEAN
        => if True:
                    states[slots[i]] = CLEAN
    the older copy of a row that is written keeps its place
        if states[slot] == CLEAN or states[slot] == LOADING: => if False:
::test_a_write_wins_over_a_spill_under_way
    a spill forgets a write that came meanwhile
        if states[slots[i]] != SPILLING: => if False:
::test_a_row_that_is_needed_again_before_it_has_left_stays
    a row that is needed again leaves all the same
        leaves_after[slot] = STAYS continue => continue
::test_a_planned_row_is_in_memory_when_it_is_read_and_leaves_once_its_step_is_home
    rows leave the memory before their step's rows are home
        self._leaving[0].step > home_through => False
::test_a_row_that_gets_a_slot_while_it_is_written_past_memory_has_the_written_bytes
    a row that got a slot while it was written keeps its older bytes there
        places = self.cold.write(keys, rows) with self._lock: left = self._overwrite(keys, numbers, rows)
        => places = self.cold.write(keys, rows)
                with self._lock:
                    left = np.arange(len(keys))
::test_a_new_attempt_begins_with_an_empty_memory_of_any_size_and_all_rows[3]
    a row that the cold tier moved loses its new place
        whereabouts[numbers[i]], freed[i] = new[i] + np.uint32(1), old[i]
        => whereabouts[numbers[i]], freed[i] = new[i] + np.uint32(1), new[i]
tests/system/test_late_rows.py::test_no_row_is_late_with_a_memory_of_less_than_a_tenth
    memory has no room for rows that wait to leave
        min(n + spare, group.num_rows, MOST_SLOTS) => min(n, group.num_rows, MOST_SLOTS)
tests/stores/cold/test_segment_file.py::test_a_freed_place_stays_readable_within_a_hold_and_is_used_again_after_it
    a cold row's place is used again while it is read
        while self._emptied and (not self._holds or next(iter(self._holds)) > self._emptied[0][0]):
        => while self._emptied:
::test_a_row_is_not_settled_at_an_old_place_where_it_was_written_again
    a cold row that was written again while it was moved gets its old bytes
        with self._tidying, self.hold(): => with self._tidying:
tests/stores/cold/test_segment_file_disk.py
::test_a_page_that_the_disk_forgot_to_write_is_found_although_it_has_older_bytes_of_the_same_rows
    a page of a segment's earlier use passes for one of now
        segments.uses[self._segment] * segments.count * segments.num_pages => 0
::test_a_disk_that_takes_a_part_of_what_is_written_gets_the_rest
    the rest of a short write is lost
        rest, offset = rest[written:], offset + written => rest = rest[len(rest) :]
tests/stores/test_frozen_rows.py::test_a_frozen_store_has_no_changed_row_until_one_is_written
    a checkpoint leaves its rows changed
        changed, self.changed_bits = self.changed_bits, np.zeros(len(self.changed_bits), np.uint64)
        => changed = self.changed_bits.copy()
::test_a_row_is_set_aside_once_and_not_after_it_was_handed_out[memory]
    a row that is written over twice has the later bytes in a checkpoint
        left = found_rows(numbers, self._pending, self._aside)
        => left = found_rows(numbers, self._pending, np.zeros_like(self._pending))
    a row that a checkpoint has is set aside
        clear_bits(self._pending, numbers[stored]) => pass
::test_two_threads_give_the_same_rows_as_one
    rows are set aside while a checkpoint copies them
        with self._lock: left = found_rows(numbers, self._pending, self._aside)
        => if True:
                    left = found_rows(numbers, self._pending, self._aside)
tests/checkpoints/test_going_on.py::test_a_checkpoint_that_is_written_late_has_the_rows_of_its_barrier
    a checkpoint's rows are written over
        frozen.set_aside(keys, numbers) => pass
tests/system/test_stalls.py::test_rows_that_find_no_room_beside_those_of_a_checkpoint_are_counted_under_checkpoint
    rows come home where there is no room beside a checkpoint's
        if message is None or self.waits_for_checkpoint or => if message is None or
tests/checkpoints/test_faults.py::test_a_loss_of_power_at_any_moment_leaves_a_whole_checkpoint
    a row file is named before it is on the disk
        file.sync() crash_point("row file written")
        => pass
                crash_point("row file written")
    the dense file is named before it is on the disk
        dense.sync() => pass
    a manifest is renamed before it is on the disk
        file.write(render(content)) yield True file.sync() => file.write(render(content))
    a manifest names files of a folder that is not on the disk
        yield from self._sync_folders(folder) => yield True
tests/checkpoints/test_writer.py::test_so_many_checkpoints_stay_and_each_of_them_is_whole
    a checkpoint more than asked for stays
        islice(filter(None, older), n - 1) => islice(filter(None, older), n)
::test_deltas_with_more_rows_than_the_base_are_merged_into_it_and_what_changed_last_stays
    the oldest value of a row wins a merge
        for files in reversed(own)] => for files in own]
::test_a_block_larger_than_the_queue_goes_in_alone_and_finish_always_does
    a dense side that changed on its way becomes a checkpoint
        if dense.checksum != item.dense_checksum: => if not dense.checksum:
::test_a_full_queue_takes_nothing_until_something_was_written
    a queue of rows has no room again once it was full
        self._taken_bytes += len(item) => pass
::test_what_waits_in_the_queue_never_exceeds_its_bytes
    a queue takes more than its bytes
        waiting + len(content) > QUEUE_BYTES => waiting > QUEUE_BYTES
::test_a_damaged_checkpoint_is_dropped_only_when_a_newer_one_is_durable
    files of a checkpoint with a damaged manifest are garbage
        may_clean = folder.name not in unclear and (is_shared or shard.number == 0)
        => may_clean = is_shared or shard.number == 0
tests/checkpoints/test_restore.py::test_only_rows_that_changed_are_written_and_new_ones_forgotten
    rows that no layer has keep what was trained
        if len(keys): store.forget(keys)
        => if len(keys):
                    pass
tests/checkpoints/test_damage.py::test_flipped_bits_are_detected_and_never_restored
    a damaged row file is restored
        found = size, xxhash.xxh3_64_hexdigest(content.data) => found = size, file.checksum
tests/checkpoints/test_training_identity.py::test_other_data_is_named
    a restart takes other contents of the same size
        elif same_sizes and before.checksum != file.checksum: => elif False:
::test_a_key_that_a_later_version_adds_had_its_default
    a new key makes every checkpoint one of another job
        before = was[name] if name in was else msgspec.to_builtins(default_of(field)) => before = was.get(name)
::test_the_training_digests_of_6aa9055_are_those_of_today
    a digest forgets the keys of other models
        content[name] |= defaults_of_other_kinds(section) => pass
tests/test_job.py::test_a_job_file_that_cannot_be_trained_is_refused_with_one_sentence
    the range of a key is not checked
        return is_number(value, number) and is_within(number, value) => return is_number(value, number)
    a key of another kind is taken
        if type(value) is type(default) and value == default: => if True:
tests/readers/test_file_samples.py
    the last block of a file is not sampled
        start = (nbytes - block_bytes) * index // (num_blocks - 1)
        => start = (nbytes - block_bytes) * index // num_blocks
tests/readers/test_workers.py::test_a_data_error_arrives_after_the_batches_before_it
    an error of the data set is swallowed
        except RowcastError as error: sender.send(error)
        => except RowcastError:
                    sender.send(EndOfBatches())
::test_a_run_goes_on_where_another_stopped
    a run that goes on waits for the first decoder
        self._next_step = (share.start or Position()).step => self._next_step = 0
tests/readers/test_ids_everywhere.py::test_ids_that_are_replaced_are_replaced_alike
    an unsigned id of 64 bits wraps to a negative one
        ids.dtype == np.uint64 and int(ids.max()) > LARGEST_ID => False
tests/analysis/test_odd_files.py
    one odd cell makes text of a column of numbers
        if numbers and numbers + cells["absent"] >= enough: => if numbers + cells["absent"] == whole:
    the first odd cell is placed in the line before it
        return lambda i: f"{path}, line {first + i}" => return lambda i: f"{path}, line {first + i - 1}"
tests/readers/test_refused.py::test_it_is_refused
    an id may be as large as its table
        < self._limits[present]).all() => <= self._limits[present]).all()
tests/readers/test_conformance.py::test_a_shuffle_permutes_each_block_by_philox_of_seed_epoch_and_block
    every epoch is shuffled alike
        [seed, epoch * 2**32 + block] => [seed, block]
tests/readers/test_schedule.py::test_evaluations_follow_every_n_steps_and_each_epoch_but_never_twice
    an evaluation comes a step early
        at.train_step % self._eval_every == 0 => (at.train_step + 1) % self._eval_every == 0
"""

TRAINER = """\
tests/system/test_device_order.py::test_every_order_that_the_waits_allow_gives_the_bits_of_the_plain_loop[0]
    a fill does not wait for the victims' last step
        fill.wait(self._computed[after], "fill_after") => pass
    a fill is issued before the step that it waits for
        after <= self._last_issued => after <= self._last_issued + 1
    a fill does not wait for the copy to staging
        fill.wait(plan.copied[message.piece], "copied") => pass
    rows are copied over rows still in fill staging
        stream.wait(room.after, "fill_staging") => pass
    victims are gathered over victims still in evict staging
        fill.wait(room.after, "evict_staging") => pass
    a look-up does not wait for its rows
        self._streams.compute.wait(step.plan.filled[-1], "filled") => pass
    victims are copied home before they are gathered
        stream.wait(task.gathered, "gathered") => pass
    rows are announced before they are in the ring
        if not self._streams.done(task.room.used, "sent"): => if not task:
    the ring is released before it was copied
        self._streams.done(self._copying[0][1], "released") => self._copying[0]
    arrays of a plan are overwritten by a later plan's
        PlanMemory(streams, slots.groups) for _ in range(depth + 2)
        => PlanMemory(streams, slots.groups) for _ in range(depth)
    the bytes before a piece's rows are staged too
        message.payload.nbytes - message.rows[0].offset => message.payload.nbytes
    a step is done before its last victims are home
        task.plan <= plan for task in tasks => task.plan < plan for task in tasks
tests/trainer/test_staging.py
    a place in staging is taken again while it is in use
        span.begin < begin + size - self.nbytes => span.begin < begin - self.nbytes
tests/trainer/test_plan_check.py
    consecutive plans share their memory
        self._memory[plan.plan % len(self._memory)] => self._memory[plan.plan // 2 % len(self._memory)]
    chunks of long rows lie over the plan's arrays
        self._block[sent : sent + nbytes] => self._block[:nbytes]
tests/kernels/test_choose.py
    a row whose look-ups fill one chunk counts as long
        words[segments + row + 1] - words[segments + row] > longest
        => words[segments + row + 1] - words[segments + row] >= longest
    there is no room for the last chunk of each long row
        num_lookups // CHUNK_LOOKUPS + long_rows => num_lookups // CHUNK_LOOKUPS
tests/planner/test_plans.py::test_plans_and_barriers_equal_brute_force_field_by_field
    look-ups that are made without a planner name the bags in the batch's order
        counts)[order] => counts)
tests/kernels/test_triton.py::test_padding_and_other_slots_are_never_changed
    a row's padding is trained with it
        if WIDTH > D: => if WIDTH < D:
::test_a_step_of_the_rows_has_the_bits_of_torch
    Adagrad in Triton divides by the root alone
        tl.div_rn(grads * -rate, tl.sqrt_rn(state) + CONSTANTS[0]) => tl.div_rn(grads * -rate, tl.sqrt_rn(state))
    row-wise Adagrad in Triton takes the sum of squares
        tl.div_rn(row_sums(grads * grads), D * 1.0) => row_sums(grads * grads)
    Adam in Triton divides by the root alone
        tl.sqrt_rn(square) + CONSTANTS[0] => tl.sqrt_rn(square)
tests/kernels/test_triton_fallback.py::test_an_update_that_is_not_a_number_is_found
    the check lets through what is not a number
        if not torch.all((values - expected).abs() <= allowed): => if torch.any((values - expected).abs() > allowed):
::test_long_rows_that_are_not_trained_are_found
    Triton's kernels are chosen although they differ
        return triton_ops if found is None else => return triton_ops if found is not None else
tests/simulation/test_lives.py::test_every_life_ends_with_the_bits_of_the_plain_loop[0]
    the dense side goes home before the barrier's rows
        if not self._states or self.queued: => if not self._states:
    a run that goes on forgets the random numbers
        restore_random(self.device, tensors) => pass
    a run that goes on forgets the dense optimizer
        restore_optimizer(self._model, self.optimizer, tensors) => pass
tests/system/test_barrier_states.py::test_a_run_with_small_rings_and_barriers_of_both_kinds_takes_every_row
    a barrier without a checkpoint has no end
        (S.GATHERING, E.GATHERED, S.RUNNING), =>
    a barrier without a checkpoint packs the dense side
        TrainerEvent.MUST_SAVE if flush.header.checkpoint else TrainerEvent.GATHERED => TrainerEvent.MUST_SAVE
    later slots of a barrier lie over the first ones
        self._open.block[message.span.offset : message.span.offset + message.span.nbytes]
        => self._open.block[: message.span.nbytes]
tests/system/test_tight.py::test_plans_larger_than_the_ring_pass_a_cache_of_one_batch_with_a_late_store
    later rows, of a step or a barrier, are moved to and from the slots of the first ones
        Move(self.records[span.group], group_slots, span.start, => Move(self.records[span.group], group_slots, 0,
tests/system/test_bad_input.py::test_a_loss_that_is_not_finite_ends_both_naming_the_train_step
    an error of the trainer is not told to the prefetcher
        if error is not None: self.send_failure(error) => pass
    a loss that is not a number is passed over
        if not math.isfinite(loss): => if loss is None:
tests/system/test_peers.py::test_a_prefetcher_that_fails_before_the_two_have_met_ends_a_waiting_trainer
    a prefetcher that fails before the two have met is awaited
        None if began_s is None else failure_since => None if True else failure_since
::test_a_killed_peer_ends_the_other_and_nothing_is_left[prefetcher]
    a kill leaves the rings in shared memory
        Path(ring.path).unlink(missing_ok=True) => pass
tests/system/test_exact.py::test_every_way_to_train_gives_the_bits_of_the_plain_loop[sgd-single-1]
    an evaluation does not end where training goes on
        or (following is not None and following.move.kind == "train") => or False
tests/system/test_early_end.py::test_training_ends_once_so_many_in_a_row_are_not_better
    an evaluation that is as good as the best one is better
        min(known, key=losses => min(reversed(known), key=losses
::test_a_run_ends_where_the_plain_loop_does[newest-one label-1]
    a step after the end of training is trained
        if self._training.ended_by: => if self.ended_by:
::test_a_run_killed_at_any_time_ends_after_the_same_step_with_the_same_best_checkpoint[1-1]
    the best checkpoint does not stay
        for name in (manifest.name, manifest.best) => for name in (manifest.name, manifest.name)
    an evaluation ends after its checkpoint
        is_over = self._barrier.evaluated or => is_over =
    a checkpoint is said to be the best whatever its evaluation
        return place >= 0 and evaluations[place].train_step == self.train_steps => return place >= 0
tests/telemetry/test_history.py::test_all_evaluations_come_back_from_a_checkpoint
    a run that goes on forgets its evaluations
        self.restore_evaluations(tensors) => pass
::test_the_file_of_losses_begins_with_those_of_the_checkpoint
    the file of losses begins with the run that goes on
        self._write(self._losses.tobytes()) => pass
tests/trainer/test_evaluate.py::test_parts_are_added_in_the_tree
    all parts of a rank add to the first one's figures
        self.counts.sums[name][part, number].add_( => self.counts.sums[name][0, number].add_(
tests/trainer/test_own_step.py
    the state of an object that is not restored is taken
        if xxhash.xxh3_64_hexdigest(pack(save())) == checksum: => if True:
    what only evaluates makes training objects
        made_objects(job, model, self._source) if trains else [] => made_objects(job, model, self._source)
    whatever a model's step returns is taken
        if trained is not None and not is_truth(trained): => if False:
    an optimizer may be given a closure
        stateful.register_step_pre_hook(refuse_closure) => pass
    tensors of a user's objects may be NaN
        tree_leaves(part.state_dict()) => []
    only the first rank's failure ends all
        if "" in theirs: => if "" in first:
tests/system/test_own_step.py::test_its_bits_are_the_plain_loops_for_any_parts_and_trainers[everything]
    random numbers of a model's step are those of a rank's last part
        torch.manual_seed(part_seed(self._seed, train_step, self._parts)) => pass
::test_a_run_that_is_stopped_at_any_step_goes_on_with_the_same_state
    a run that goes on forgets the training objects
        self.state, self.restore = kept.state, kept.restore => self.state, self.restore = kept.state, len
::test_figures_of_the_models_own_are_the_same_for_any_number_of_trainers
    parts of an evaluation draw random numbers of whatever came before
        if self._rank.parts > 1:  # with => if self._rank.parts > 1 and training:  # with
    figures of other ranks are left out
        pieces = torch.split(sums.all.view(-1, sum(widths)), widths, dim=1)
        => pieces = torch.split(sums.own.view(-1, sum(widths)), widths, dim=1)
tests/recovery/test_any_step.py
    a run that goes on forgets that it was evaluating
        self.evaluating = self.model.restore(tensors) => self.model.restore(tensors)
tests/hostile/test_peers.py::test_a_dense_side_whose_checksum_is_of_other_bytes_is_refused
    a dense side of other bytes is taken
        if checksum != message.checksum: => if not checksum:
::test_a_trainer_with_weighted_bags_ends_with_a_sentence_when_its_prefetcher_sends[a look-up far outside]
    a slot beyond the cache is looked up
        np.flatnonzero(largest >= np.array([limit for _, limit in self.limited])) => []
::test_a_value_one_beyond_its_range_is_refused
    a value one beyond its range passes
        largest >= np.array([limit for _, limit in self.limited])
        => largest > np.array([limit for _, limit in self.limited])
tests/trainer/test_embedding.py::test_bags_are_summed_or_averaged_and_empty_bags_are_zero
    an empty bag is divided by its look-ups
        lookup.offsets.diff().clamp(min=1) => lookup.offsets.diff()
tests/trainer/test_row_optimizers.py::test_touched_rows_end_with_the_bits_of_the_whole_table
    the bias correction of Adam is a step behind
        step=train_step + 1, => step=max(1, train_step),
    Adagrad divides by the sum of squares itself
        state.sqrt().add_(rule.eps), value=-rule.lr => state.add(rule.eps), value=-rule.lr
    Adagrad divides by the root alone
        state.sqrt().add_(rule.eps) => state.sqrt()
    row-wise Adagrad takes the sum of squares
        state += (row_grads * row_grads).mean(1, keepdim=True) => state += (row_grads * row_grads).sum(1, keepdim=True)
    row-wise Adagrad divides by the root alone
        (state.sqrt() + rule.eps) => state.sqrt()
    Adam does not correct its second moment
        math.sqrt(1 - beta2**rule.step) => math.sqrt(1 - beta2)
    Adam divides by the root alone
        exp_avg_sq.sqrt().add_(rule.eps) => exp_avg_sq.sqrt()
tests/kernels/test_compiled.py::test_steps_have_the_bits_of_torch
    a compiled step of SGD is rounded twice
        multiply_add(scratch[U(c)], -lr, weights.flat[row + U(c)]) => weights.flat[row + U(c)] - lr * scratch[U(c)]
    a multiply-add rounds its product
        builder.fma(*arguments) => builder.fadd(builder.fmul(arguments[0], arguments[1]), arguments[2])
    a compiled sum of squares is rounded twice
        multiply_add(grad, grad, states.flat[row + U(c)]) => grad * grad + states.flat[row + U(c)]
    a compiled sum of means begins again in every step
        states.flat[row] += means[at] => states.flat[row] = means[at]
    compiled Adagrad divides by the root alone
        (roots[at + U(c)] + eps) => roots[at + U(c)]
    compiled row-wise Adagrad divides by the root alone
        roots[U(ranges[k, 4] + u)] + eps => roots[U(ranges[k, 4] + u)]
    a compiled gradient is weighted before it is divided
        out[at + U(c)] += grads.flat[grad + U(c)] / divisor * weight
        => out[at + U(c)] += grads.flat[grad + U(c)] * weight
::test_an_error_in_a_thread_is_raised_for_the_caller
    an error in a kernel's thread is swallowed
        return [work(parts[0]), *(task.result() for task in running)] => return [work(parts[0])]
tests/kernels/test_triton_gpu_check.py::test_rows_whose_parts_lie_in_several_memories_are_refused
    Triton takes rows whose parts lie in several memories
        not 0 < offset < record_bytes => False
::test_a_master_of_another_stride_is_refused
    Triton takes parts of another stride
        stride != record_bytes or => False or
"""

DEPLOY = """\
tests/deploy/test_health.py::test_a_port_that_was_named_must_be_served
    a port that nobody serves is healthy
        len(statuses) >= expected and set(statuses) => set(statuses)
::test_two_processes_on_one_network_must_both_be_healthy
    one healthy process of two is enough
        set(statuses) == {200} => 200 in statuses
tests/system/test_stopping.py::test_the_launcher_passes_on_the_code_and_the_sentence_of_the_prefetcher
    the launcher ends with another code than its child
        error.exit_code = code => error.exit_code = 1
"""

RANKS = """\
tests/trainer/test_parts.py::test_parts_one_after_the_other_are_the_samples_of_the_batch_in_their_order
    a small batch leaves the last parts empty
        [part * batch_size // parts for part in range(parts + 1)]
        => [min(batch_size, part * -(-batch_size // parts)) for part in range(parts + 1)]
tests/readers/test_own_samples.py::test_each_rank_has_its_samples_of_every_batch
    a rank reads from the batch's first sample on
        start, stop = self.start + samples.start, self.start => start, stop = self.start, self.start
    a rank without samples keeps the row that it has read
        part = part if start < stop else without_samples(part) => part = part
    a rank has offsets because others have bags
        replace(own, offsets=offsets, => replace(own, offsets=own.offsets,
    ranks without all look-ups draw for theirs alone
        decode(rank if self._by_batch else UNDIVIDED) => decode(rank)
    drawn look-ups of the batch forget how large it is
        dataclasses.replace(joined, others=ids.others) => joined
::test_after_the_first_batches_a_decoder_decodes_only_its_own_rows
    a restart compares no batch with the other ranks
        step < (self.start or Position()).step + self.num_whole => step < self.num_whole
::test_a_ranks_parts_are_those_of_the_batch
    parts are counted from the batch's first sample in a rank's look-ups
        bound - bounds[0] for bound in bounds => bound for bound in bounds
tests/protocol/test_shards.py
    the blocks of a table are spread by a hash alone
        (block >> np.uint64(RUN_BITS)) * GOLDEN => block * GOLDEN
tests/planner/test_exchange.py
    rows come by key instead of by owner
        places = shards.owners(home.keys) => places = 0 * shards.owners(home.keys)
    all additions of a row are of one level
        level = levels[joined] => level = 1
    the rows of a second source are not sorted in
        if len(ends) > 1: => if len(ends) > 2:
tests/planner/test_key_lists.py
    a rank may ask for rows of another shard
        owner(tables[t]["line"], key, count) != number => False
    a list may hold rows of another group's tables
        key < tables[t]["first_key"] or => False or
    bytes may follow the last group
        if at < len(content): => if False:
    a number may take more bytes than it needs
        if byte == 0 and shift > 0: => if False:
    a list may announce more keys than it has bytes
        if num_keys > len(content) - at: => if num_keys > 2**31:
tests/system/test_ranks.py::test_numbers_that_are_no_powers_of_two_have_the_bits_of_as_many_parts[3-6]
    the bags of a rank's parts lie on each other
        one_after_another(bags, starts([source.num_bags for source in sources])) => one_after_another(bags)
    a rank sends back the gradient of one part
        add_levels(gradients, share.home_to, share.home_of, share.header.home_levels) => pass
::test_numbers_that_are_no_powers_of_two_have_the_bits_of_as_many_parts[5-5]
    parts are added one after the other
        values[:: 2 * distance][: len(others)].add_(others) => values[0].add_(others.sum(0))
::test_numbers_that_are_no_powers_of_two_have_the_bits_of_as_many_parts[3-3]
    every part counts the same, however large
        self._share(size, shared.batch_size) => self._share(1, self._rank.parts)
    an owner trains on the gradient of one rank
        add_levels(returned, share.to, share.of, share.header.levels) => pass
::test_every_setting_has_the_bits_of_the_plain_loop_with_the_same_setting[weights that few parts use]
    a weight that no part uses has a gradient of zeros
        total[first:end].view_as(weight) if given else None => total[first:end].view_as(weight)
::test_a_weight_that_has_a_gradient_in_some_batches_only_is_refused_by_name[2]
    a weight without a gradient in a later batch is trained on zeros
        if bool(given) != (gradient is not None): => if given and gradient is None:
tests/system/test_exchange_memory.py::test_steps_that_grow_drop_memory_only_when_no_step_uses_it[2]
    memory is dropped while a step uses it
        self._in_use[step.step] = [shared.memory, shared.vectors] => self._in_use[step.step] = []
tests/trainer/test_meeting.py::test_no_rank_destroys_its_group_before_all_close
    a rank destroys its group alone
        self.agree(b"closes", min(self._timeout_s, CLOSING_S), never) => pass
tests/trainer/test_torch_collectives.py::test_on_a_device_the_time_of_a_collective_begins_when_those_before_it_are_complete
    a collective's time begins with the first one
        self._begun.popleft()
        self._since_s = time.monotonic()
        => self._begun.popleft()
tests/system/test_ranks.py::test_every_setting_has_the_bits_of_the_plain_loop_with_the_same_setting[dropout]
    the parts of two ranks drop out the same inputs
        part_seed(self._job.job.seed, shared.step.header.train_step, number)
        => part_seed(self._job.job.seed, shared.step.header.train_step, part)
"""

SEEN = """\
tests/telemetry/test_ranks.py::test_a_rank_counts_the_rows_and_bytes_that_brute_force_moves
    what a rank gives itself counts as exchanged
        sum(share.send_counts) - share.send_counts[rank] => sum(share.send_counts)
    evaluations exchange gradients
        self.gradient_bytes if trains else 0 => self.gradient_bytes
::test_what_ranks_share_out_adds_up_to_the_batch
    a rank counts the distinct rows that it received
        num_unique=sum([step.num_rows(index) for step in steps]),
        => num_unique=sum([step.groups[index].num_unique for step in steps]),
tests/system/test_stalls.py::test_ranks_that_are_too_slow_are_counted_under_ranks
    waits for other ranks are no stall
        self.stalled("ranks", seconds, step, ended_s) => pass
tests/telemetry/test_metrics.py::test_the_metrics_of_a_rank_carry_its_number
    every rank says that it is the first
        by_name[name].add_metric((str(rank), *labels), value) => by_name[name].add_metric(("0", *labels), value)
tests/analysis/test_timeline.py::test_pairs_of_two_hosts_are_put_together_by_the_wall_clock
    pairs of two hosts keep their own clocks
        by = self.wall_offset - other.wall_offset => by = 0.0
tests/telemetry/test_report.py::test_the_report_of_all_ranks_adds_what_they_share_out_and_keeps_what_each_did
    the report of all ranks has the waits of the first
        waited_s = max(rank.trainer_wait_s for rank in ranks) => waited_s = ranks[0].trainer_wait_s
"""

DATA = """\
tests/system/test_batch_checksums.py::test_a_restart_compares_ids_and_the_dense_parts_that_were_known
    a restart reads other ids
        expected is not None and expected.ids != part.ids => False
tests/trainer/test_meeting.py::test_ranks_that_have_read_other_batches_name_what_differs
    ranks do not compare the first batches
        start.first_batches != first.first_batches => False
::test_ranks_that_read_other_data_files_name_the_file
    ranks do not compare their data files
        start.data_checksums != first.data_checksums => False
tests/system/test_ranks_read_the_same.py::test_a_batch_that_differs_is_never_trained
    ranks do not compare the batches of a step
        if differ(told.checksum, added.checksum): => if False:
tests/system/test_faults_ahead.py::test_every_step_before_a_fault_is_trained_and_in_a_checkpoint
    a fault in the data ends the run as its end does
        if barrier.fault is not None: => if False:
::test_a_stop_before_the_fault_is_a_stop
    a stop before a fault raises it
            fault=self._keys.fault if self.data_is_planned else None => fault=self._keys.fault
"""

KEPT = """\
tests/checkpoints/test_foreign.py
    a link that is named as a file of ours is taken for one
        stat.S_ISREG(path.lstat().st_mode) => stat.S_ISREG(path.stat().st_mode)
::test_another_runs_checkpoint_stays_whole_and_is_not_counted_among_those_kept
    a checkpoint of another run is taken for one of this run
        if found not in (None, run_id): => if False:
::test_a_checkpoint_never_takes_the_place_of_another_runs
    a checkpoint takes the place of another run's
        if (run_id := run_of(folder)) not in (None, self._run_id): => if False:
::test_files_go_only_after_the_removal_of_their_manifest_is_on_the_disk
    files go although the removal of their manifest may be lost
        self._unsynced.add(folder) => pass
::test_checkpoints_of_two_runs_are_both_left_where_nobody_knows_which_was_replaced
    checkpoints of several runs are cleared away as those of one
        if len(runs) <= 1: => if True:
tests/trainer/test_earlier_results.py::test_a_folder_that_is_not_ours_is_never_used
    a fresh run writes into somebody else's folder earlier/
        if self._results() and not is_free and self._held() is None: => if False:
::test_a_kill_while_results_are_set_aside_loses_none
    results that are on their way to earlier/ are forgotten
        for note in (self._owner, self._moving) if => for note in (self._owner,) if
tests/protocol/test_endpoint.py::test_a_start_removes_the_sockets_of_killed_runs_and_of_no_others
    the socket of a process that lives is removed
        if not try_lock(descriptor, lock): => if False:
::test_a_run_whose_dead_lock_is_being_removed_starts_all_the_same
    a start gives up at a lock that is being removed
        if time.monotonic() > refused_s: => if True:
tests/stores/test_left_tables.py::test_keys_of_a_prefetcher_that_is_still_at_work_stay
    the rows of a rank that is still at work are deleted
        if folder != job.run_dir: => if False:
tests/stores/test_redis_rows.py::test_a_copy_of_a_whole_disk_leaves_the_rows_of_the_original_alone
    a copied disk deletes the rows of the original
        elif earlier.machine not in (None, machine_of(folder)): => elif False:
tests/recovery/test_left_behind.py::test_a_start_looks_for_what_ranks_and_other_stores_have_left
    nobody looks for what another number of ranks has left
        remove_left_tables(job) => pass
tests/stores/test_touched_rows.py::test_more_rows_than_the_index_numbers_are_refused_by_that_cause
    an index that is full blames memory
        limit if most <= indexed else INDEX_LIMIT => limit
"""

LIMITS = """\
tests/telemetry/test_slow_callers.py::test_a_new_caller_takes_the_place_of_the_oldest
    a new caller of the metrics port takes nobody's place
        return len(self._callers) == MOST_CALLERS => return False
::test_a_byte_now_and_then_gives_no_more_time
    a caller that sends a byte now and then stays
        late_s = time.monotonic() - REQUEST_S => late_s = 0.0
tests/trainer/test_meeting.py::test_more_greetings_of_a_rank_than_are_kept_are_of_no_rank
    greetings of a rank have no limit
        max_length=MOST_GREETINGS => max_length=10**6
::test_texts_of_a_peer_are_shown_without_control_characters
    a rank's texts are shown as they are
        return cleaned(value) => return value
tests/protocol/test_endpoint.py::test_a_peer_runs_until_a_signal_stops_it_and_again_after_that
    a stopped peer on this host is waited for
        status.state not in "TZX" => status.state not in "ZX"
tests/system/test_peers.py::test_a_silent_peer_that_runs_has_until_the_stall_timeout
    a busy peer on this host is given up
        if not self._link.peer_runs: => if True:
tests/recovery/test_restart_limit.py::test_rare_kills_of_a_run_of_weeks_never_end_it
    restarts count for ever
        if now_s - time_s < WITHIN_S => if True
"""

STOPS = """\
tests/test_signals.py::test_signals_within_a_second_are_one_and_what_a_parent_passes_on_is_never_another
    a signal of the same moment is a second one
        time.sleep(TOGETHER_S) => pass
    what a parent passes on is a second signal
        leave_at_once(128 + self._next(STOPS)) => leave_at_once(128 + self._next(HELD))
::test_a_signal_while_a_process_is_leaving_changes_nothing
    a signal kills a process that is leaving
        atexit.register(ignore_signals) => pass
::test_a_child_learns_that_its_parent_was_killed_before_it_could_ask_to_be_told
    a parent that was killed early is missed
        if os.getppid() != parent: => if False:
"""

ADOPTED = """\
tests/adopt/test_foreseen_ids.py::test_sasrec_over_lists_is_foreseen_as_its_function_gives_the_ids
    what the function of a script draws stays drawn
        self._give_ids if self.give_ids is not no_ids else no_ids => self.give_ids
::test_what_the_function_gives_wrongly_is_refused_at_its_batch
    an id that the function gives may be outside of its table
        (ids >= 0) & (ids < table.num_embeddings) => (ids >= 0)
::test_sizes_that_the_step_reads_from_its_batch_are_foreseen
    a list that the step reads is a constant
        recorder.note_list(tensor, numbers) => pass
tests/adopt/test_ranks.py::test_a_batch_gets_the_rows_of_the_batch_that_another_rank_trains_with_it
    ranks tell rows with the number of another step
        number=self.num_begun + ahead, => number=self.num_begun + ahead + 1,
    ranks that have begun more batches than others are given rows of other steps
        + self._begun[rank] - self._begun[self.rank.number] => + 0
::test_a_rank_that_does_not_listen_keeps_nobody_waiting_and_lists_are_few
    a rank waits until others take its rows
        way.send(content, zmq.NOBLOCK) => way.send(content)
::test_a_rank_waits_for_the_others_when_a_loop_begins_but_not_for_long
    a rank whose loop begins announces its own rows alone
        if left_s <= 0 or not self._inward.poll(1 + int(1000 * left_s)): => if True:
::test_what_is_no_list_is_dropped
    a list of a rank that is none ends a script
        if 0 <= coming.rank < self.rank.count and => if
tests/adopt/test_adopt.py::test_positions_of_ids_are_those_of_a_search_whatever_the_calls_before_have_left
    a place that an earlier call has left is beyond the step's rows
        at[i] = min(max(numbers[row], 0), len(ids) - 1) => at[i] = numbers[row]
tests/adopt/test_saved.py::test_a_script_that_was_lost_goes_on_from_its_save_with_the_same_bits
    a save has rows as they were when a batch last looked them up
        rows = np.union1d(rows, moving) => pass
    rows that a save has moving are at rest after it
        |= moves.numpy() => |= False
::test_a_script_that_was_lost_within_an_epoch_goes_on_at_its_batch
    an epoch's order is drawn again with the random states of the step
        set_states(begun if skip else now, owned) => set_states(now, owned)
    steps go on with the random states of the epoch's beginning
        if skip: set_states(now, owned) => if False: set_states(now, owned)
::test_a_script_goes_on_after_a_save_that_failed
    a save that fails ends the engine
        self._send(Answer(number=message.number, records=str(error).encode())) => raise error
::test_only_rows_with_another_value_are_written_also_after_a_restart
    every save writes all rows
        goes_on = last is not None and last.holding_all() == script and => goes_on = False and
tests/adopt/test_script_engine.py::test_every_read_gives_the_last_write
    rows that are written while a step fetches them come as they were before
        if self._current is None or step.number != self._current.step: => if False:
    a step that is announced later gets rows that have not come home
        for late in self._leaving: => for late in ():
    rows that a script writes beside the plan overtake victims
        self._engine.sender.send_parcel(message) => self._engine.conversation.send(message)
    rows that a script asks for are read before its victims are home
        self._engine.sender.send_parcel(ask) => self._engine.conversation.send(ask)
    rows in slots are not among those that were trained
        residency.is_trained[slots] = True => pass
    trained rows that the store has are not listed
        next(self._trained, NO_ROWS) => NO_ROWS
    rows that a script writes beside the plan stay on the device
        self._return(place, ids[~is_planned], => (lambda *rows: None)(place, ids[~is_planned],
    a step that trains nothing counts its rows as trained
        if self._current is not None and self._steps[0].trains: => if self._current is not None:
    rows of a step are said to be older or newer than they were read
        returned=reading.returned => returned=self._writeback.returned
::test_a_row_that_was_trained_since_keeps_what_it_got_then
    a row gets again what has come home long ago
        late.number > message.returned: => late.number >= message.returned:
::test_rows_in_slots_are_those_that_came_last
    a row that has left its slot is still looked for there
        row_in[cells[cell]] != rows[i]: => False:
::test_rows_that_come_and_go_for_long_are_found_in_memory_that_follows_the_slots
    cells that are emptied lose today's rows
        slots = np.flatnonzero(self.row_in >= 0) => pass
::test_what_is_not_known_to_be_home_is_bounded
    what is not known to be home grows without end
        if len(self._leaving) > MOST_LEAVING: => if False:
::test_a_write_of_many_rows_waits_for_those_that_it_has_sent
    all rows of a write are sent before the first is known to be home
        MOST_LEAVING * self._at_once( => 1000 * MOST_LEAVING * self._at_once(
tests/adopt/test_ruled_tables.py::test_nothing_is_drawn_and_another_seed_gives_other_rows
    the seed of a rule is ignored
        self._init, self._seed = init, seed => self._init, self._seed = init, 0
::test_each_rule_has_the_bits_of_the_twin_with_rows_in_this_process
    a rule makes the row after
        self.weights_of(index.numpy()) => self.weights_of(index.numpy() + 1)
::test_rows_by_a_rule_have_the_bits_of_the_twin
    rows that were trained stay in an engine that ends
        self.here.ids, self.here.rows = ids, self._copied_rows(ids) => pass
::test_a_save_names_first_values_and_holds_the_rows_with_others
    nobody who serves a rule knows the row of the padding
        else [rule.zero_row] => else []
    rows that a large table's optimizer moves are not saved again
        moving = self.rows.trained().numpy() if self.is_large else => moving = NO_ROWS.numpy() if self.is_large else
    a version of a table in a file has only trained rows
        whole=tables.in_files if changes.reason else (), => whole=(),
tests/adopt/test_released.py::test_a_table_in_files_has_the_bits_of_the_table_loaded_whole
    bfloat16 is widened by another shift
        raw.view(np.uint16).astype(np.uint32) << 16 => raw.view(np.uint16).astype(np.uint32) << 15
::test_files_without_the_rows_of_the_parameter_are_refused
    files with other rows than the parameter are taken
        if total != num_rows: => if False:
::test_a_file_that_changes_ends_the_script_before_a_row_of_it_is_trained
    nobody looks at released files while they are read
        self._files[file].check() => pass
::test_a_save_has_changed_rows_and_goes_on_with_equal_files_elsewhere
    other released files than those of a save or an overlay are taken
        if pair[0] != pair[1]: => if False:
    rows are replaced from the beginning of each file
        content[rows[chosen] - begin] => content[rows[chosen] * 0]
tests/readers/test_file_samples.py::test_first_values_that_a_save_names_are_those_of_the_same_file
    another file is taken for the one that a save names
        (now := file.sampled()) != file: => (now := file) != file:
tests/adopt/test_script_engine.py::test_a_row_that_is_returned_and_then_leaves_has_its_newest_value
    a victim is written beside a row that a script has returned
        or any(own.is_alone for own in self._writing) => or False
::test_a_row_that_left_and_is_then_returned_has_its_newest_value
    a row that a script has returned is written beside others
        is_alone = not isinstance(message, RowsBack) or => is_alone = isinstance(message, Ask) or
::test_rows_are_asked_for_once_all_before_are_home
    rows are read for a script while those before are written
        is_alone = not isinstance(message, RowsBack) or => is_alone = isinstance(message, Returned) or
tests/readers/test_script_ids.py::test_rows_that_no_script_looks_up_are_refused
    rows of a step that was not announced are taken
        message.step != self._step or => False or
    a row beyond its table is taken
        rows[-1] < size and => True and
"""

TABLES = (PROTOCOL, PREFETCHER, TRAINER, DEPLOY, RANKS, DATA, STOPS, SEEN, KEPT, LIMITS, ADOPTED)
MUTANTS = tuple(mutant for table in TABLES for mutant in mutants_of(table))
