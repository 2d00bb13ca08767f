"""What a tired engineer might leave out, or get wrong by one; and the test that would notice, the quickest that does.

`find` stands in the product once, whatever the whitespace between its words and signs. In which file, the runner
finds out.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str  # what goes wrong
    find: str
    replace: str
    test: str  # a file or one test of it


CODEC = "tests/protocol/test_codec.py"
DAMAGE = "tests/checkpoints/test_damage.py"
EXACT = "tests/system/test_exact.py::test_every_way_to_train_gives_the_bits_of_the_plain_loop"
LIVES = "tests/simulation/test_lives.py::test_every_life_ends_with_the_bits_of_the_plain_loop"
ORDER = "tests/protocol/test_order.py::test_what_is_out_of_order_is_refused_with_both_numbers"
PEERS = "tests/system/test_peers.py"
PLANNER = "tests/planner/test_planner.py"
PLANS = "tests/planner/test_plans.py::test_plans_and_barriers_equal_brute_force_field_by_field"
POWER_LOSS = "tests/checkpoints/test_power_loss.py::test_a_loss_of_power_at_any_moment_leaves_a_whole_checkpoint"
RESTORE = "tests/checkpoints/test_restore.py"
RING = "tests/protocol/test_ring.py"
SESSION = "tests/protocol/test_session.py"
STORES = "tests/stores"
TIGHT = "tests/system/test_tight.py::test_plans_larger_than_the_ring_go_through_a_cache_of_one_batch_with_a_late_store"
VERIFY = "tests/verify/test_verify.py"
WAITS = "tests/system/test_device_order.py::test_every_order_that_the_waits_allow_gives_the_bits_of_the_plain_loop"
WRITER = "tests/checkpoints/test_writer.py"

PROTOCOL = (
    Mutant(
        "a frame that repeats or skips a number is taken",
        "envelope.sequence != self._num_received",
        "False",
        f"{SESSION}::test_repeated_and_missing_frames_are_refused_with_both_numbers",
    ),
    Mutant(
        "a frame of another incarnation is taken",
        "own not in (0, incarnation) and",
        "False and",
        f"{SESSION}::test_a_frame_of_another_incarnation_is_refused_by_both_ends",
    ),
    Mutant(
        "a frame without incarnation is taken for good",
        "self._peer_knows_incarnation |= own != 0 and",
        "self._peer_knows_incarnation |= False and",
        f"{SESSION}::test_frames_without_incarnation_are_taken_until_the_trainer_has_its_welcome_and_no_longer",
    ),
    Mutant(
        "one step more than the depth may be announced",
        "message.step - oldest <= self.depth",
        "message.step - oldest <= self.depth + 1",
        ORDER,
    ),
    Mutant(
        "a step is done before its victims are home",
        "require(oldest.victims.complete,",
        "require(True,",
        ORDER,
    ),
    Mutant(
        "rows may come in any order",
        "require(span.start == here,",
        "require(True,",
        ORDER,
    ),
    Mutant(
        "an array may end behind its block",
        "spec.offset + nbytes <= arrays_bytes",
        "spec.offset <= arrays_bytes",
        f"{CODEC}::test_an_impossible_message_is_refused_by_both_ends_with_what_is_wrong",
    ),
    Mutant(
        "the last span of bytes is as long as the others",
        "nbytes=min(max_payload, nbytes - offset)",
        "nbytes=max_payload",
        "tests/test_packing.py",
    ),
    Mutant(
        "a piece may have more rows than staging",
        "(limit - offset) // width",
        "(max_payload - offset) // width",
        "tests/test_packing.py",
    ),
    Mutant(
        "a later piece begins with the array's first bytes",
        "source[first - spec.offset : last - spec.offset]",
        "source[: last - first]",
        "tests/test_packing.py",
    ),
    Mutant(
        "a ring is full one byte early",
        "end - self._released > self.capacity",
        "end - self._released >= self.capacity",
        f"{RING}::test_any_payload_and_any_two_fit_once_everything_is_released",
    ),
    Mutant(
        "pieces that were read out of order stay in the ring",
        "while self._open and self._open[0].done:",
        "if self._open and self._open[0].done:",
        f"{RING}::test_pieces_finish_in_any_order_and_space_is_released_in_order",
    ),
    Mutant(
        "bytes that were torn while they were read pass",
        "self._layout.check_guards(piece.ref, piece.stamp)",
        "pass",
        f"{RING}::test_a_torn_guard_is_noticed_when_viewed_and_when_done",
    ),
    Mutant(
        "the checksum of a piece is not compared",
        "(found := xxhash.xxh3_64_intdigest(payload.data)) != ref.checksum",
        "(found := 0)",
        f"{RING}::test_a_changed_payload_is_noticed_by_its_checksum",
    ),
    Mutant(
        "a message may come with fewer bytes than it announces",
        "if found != expected:",
        "if found > expected:",
        "tests/protocol/test_mirror.py::test_a_message_comes_with_exactly_the_bytes_that_it_announces",
    ),
    Mutant(
        "a broken message is passed over",
        "self._num_refused += 1 raise",
        "self._num_refused += 1\n            return True",
        "tests/protocol/test_mirror.py::test_a_message_comes_with_exactly_the_bytes_that_it_announces",
    ),
    Mutant(
        "the peer's silence has no end",
        "now_s - last_s > SILENCE_LIMIT_S",
        "False",
        f"{PEERS}::test_a_peer_that_ticks_slowly_is_still_found_silent",
    ),
    Mutant(
        "a pause of this process is held against the peer",
        "self._listening_since_s = self._last_change_s = now_s",
        "pass",
        f"{PEERS}::test_what_was_not_heard_while_this_process_was_stopped_is_not_held_against_the_peer",
    ),
    Mutant(
        "frames that wait to be sent have no bound",
        "len(self._outbox) >= QUEUE_FRAMES",
        "False",
        "tests/protocol/test_zmq_link.py::test_a_queue_beyond_all_credits_is_refused",
    ),
    Mutant(
        "a ring of another size is attached",
        "or found.st_size != nbytes",
        "or False",
        "tests/protocol/test_ring_file.py::test_a_ring_of_another_size_is_refused_with_both_sizes",
    ),
    Mutant(
        "what a disk took only a part of is not written again",
        "rest = rest[os.write(self._descriptor, rest) :]",
        "rest = rest[max(len(rest), os.write(self._descriptor, rest)) :]",
        "tests/checkpoints/test_faults.py::test_a_disk_that_takes_only_a_part_of_each_write_still_gets_everything",
    ),
    Mutant(
        "a file is renamed before it is on the disk",
        "file.write(content) file.sync()",
        "file.write(content)",
        "tests/checkpoints/test_faults.py::test_a_file_that_is_written_durably_is_the_old_one_or_the_new_one",
    ),
    Mutant(
        "the checksum of a manifest is not compared",
        "if found != manifest.checksum:",
        "if not found:",
        f"{DAMAGE}::test_a_flipped_bit_anywhere_in_the_manifest_is_refused",
    ),
    Mutant(
        "a position forgets how far its epoch is",
        "train_batch=self.train_batch + 1",
        "train_batch=self.train_batch",
        "tests/readers/test_schedule.py::test_going_on_from_any_position_gives_the_same_rest",
    ),
    Mutant(
        "the learning rate is that of the step before",
        "settings.schedule, train_step + 1",
        "settings.schedule, train_step",
        "tests/test_learning_rate.py",
    ),
)

PREFETCHER = (
    Mutant(
        "the horizon is a batch short",
        "max(0, self.num_batches + 1 - len(self._known))",
        "max(0, self.num_batches - len(self._known))",
        f"{PLANNER}::test_a_plan_waits_until_its_horizon_is_complete",
    ),
    Mutant(
        "training does not make a row dirty",
        'row["flags"] |= DIRTY if train else 0',
        'row["flags"] |= 0',
        PLANS,
    ),
    Mutant(
        "a row loses its dirty flag on the way to its next use",
        'before["flags"], before["worth"]',
        'before["flags"] & PINNED, before["worth"]',
        PLANS,
    ),
    Mutant(
        "a row that came home at a barrier stays dirty",
        'self.ring.rows["flags"] &= ~DIRTY',
        "pass",
        f"{PLANNER}::test_a_barrier_lists_dirty_rows_once_and_settles_what_is_pending",
    ),
    Mutant(
        "rows that the next step needs are evicted first",
        "for next_use in range(farthest, step, -1):",
        "for next_use in range(step + 1, farthest + 1):",
        PLANS,
    ),
    Mutant(
        "a slot is filled before its victim's last use",
        "int(victims.last_uses.max())",
        "int(victims.last_uses.min())",
        PLANS,
    ),
    Mutant(
        "a row lies in its neighbour's slot",
        'unique_slots[u] = row["slot"]',
        'unique_slots[u] = rows[(place + u + 1) & last]["slot"]',
        PLANS,
    ),
    Mutant(
        "a victim of the oldest plan under way counts as home",
        "max(step - self._depth, 0 if",
        "max(step - self._depth + 1, 0 if",
        PLANS,
    ),
    Mutant(
        "victims before a barrier count as under way",
        "self._way_home.settle(self._last_planned)",
        "pass",
        f"{PLANNER}::test_a_barrier_lists_dirty_rows_once_and_settles_what_is_pending",
    ),
    Mutant(
        "a search ends at the hole that a forgotten row left",
        "if ((cell - begin) & mask) >= ((cell - hole) & mask):",
        "if ((cell - begin) & mask) > ((cell - hole) & mask):",
        "tests/planner/test_directory.py::test_tracking_moving_and_forgetting_in_any_order_finds_exactly_what_is_tracked",
    ),
    Mutant(
        "the horizon grows beyond its bytes",
        "wanted * known_bytes <= self._budget_bytes * num_known",
        "known_bytes <= self._budget_bytes",
        "tests/planner/test_auto_horizon.py::test_the_known_batches_stay_within_the_budget",
    ),
    Mutant(
        "a plan is made a step too early",
        "self._ahead = 2 * depth + 2",
        "self._ahead = 2 * depth + 3",
        "tests/system/test_ahead.py::test_the_planner_stays_within_twice_the_depth_and_two_of_the_last_step_done",
    ),
    Mutant(
        "a stop goes on a step late",
        "self._followings.get(next_step - 1)",
        "self._followings.get(next_step)",
        "tests/adopt/test_epochs.py::test_a_run_that_the_script_stops_goes_on_right_there",
    ),
    Mutant(
        "rows are read before their victims are home",
        "needed = max(needed, plan.after_step)",
        "needed = min(needed, plan.after_step)",
        f"{EXACT}[adagrad-multi-2]",
    ),
    Mutant(
        "a step is sent a credit early",
        "oldest = plan.step - self._depth - 1",
        "oldest = plan.step - self._depth - 2",
        "tests/system/test_ahead.py::test_with_the_trainer_held_before_a_step_exactly_the_next_depth_steps_arrive",
    ),
    Mutant(
        "a piece is announced before the store has read it",
        "self.tickets = [ticket for ticket in self.tickets if not ticket.done()] return not self.tickets",
        "[ticket.done() for ticket in self.tickets]\n        return True",
        f"{EXACT}[adagrad-multi-2]",
    ),
    Mutant(
        "a barrier does not wait for rows on their way home",
        "and reached(self._writeback.applied_through, after)",
        "",
        "tests/system/test_ahead.py::test_a_barrier_waits_for_rows_that_were_sent_home_but_are_not_in_the_store",
    ),
    Mutant(
        "rows count as home before the store has written them",
        "return self.arrived_last and self.tickets_open == 0",
        "return self.arrived_last",
        f"{EXACT}[adagrad-multi-2]",
    ),
    Mutant(
        "the end is told before the last checkpoint is on disk",
        "barrier.last and self._checkpointer.busy",
        "False",
        f"{LIVES}[0]",
    ),
    Mutant(
        "a later piece of rows is written to the first rows' keys",
        "expected.keys[span.group][span.start : span.start + span.count]",
        "expected.keys[span.group][: span.count]",
        TIGHT,
    ),
    Mutant(
        "a barrier's number counts one less",
        "self.applied_barriers = expected.barrier + 1",
        "self.applied_barriers = expected.barrier",
        f"{EXACT}[sgd-single-2]",
    ),
    Mutant(
        "a difference between rows is not looked at",
        "entries.known & (entries.checksums != found)",
        "entries.known & False",
        f"{VERIFY}::test_a_write_that_the_store_loses_is_noticed_when_the_row_is_read_again",
    ),
    Mutant(
        "rows that the store took are not read back",
        "self._mark_unread(cells, to=True)",
        "self._mark_unread(cells, to=False)",
        f"{VERIFY}::test_a_write_that_the_store_loses_is_noticed_at_the_end_where_the_row_is_not_read_again",
    ),
    Mutant(
        "a row that was written is not marked as changed",
        "marks[row] = PRESENT | CHANGED",
        "marks[row] = PRESENT",
        f"{STORES}/test_changed_rows.py::test_a_row_has_changed_from_its_write_until_the_store_is_settled",
    ),
    Mutant(
        "tables of a group share their rows",
        "positions[tables == table] += self._first[table]",
        "pass",
        f"{STORES}/test_stores.py::test_tables_of_a_group_do_not_share_rows",
    ),
    Mutant(
        "a table file vouches for rows that are not on the disk",
        "self._memory.flush() self._file.sync()",
        "pass",
        f"{STORES}/test_mapped_disk.py::test_rows_are_on_the_disk_before_the_header_that_vouches_for_them",
    ),
    Mutant(
        "a table file of another checkpoint is taken",
        "if header.closed_at != checkpoint:",
        "if not checkpoint:",
        f"{STORES}/test_mapped.py::test_a_file_closed_at_another_checkpoint_is_made_anew",
    ),
    Mutant(
        "a table file has holes",
        "reserve(self._open, nbytes)",
        "os.ftruncate(self._open, nbytes)",
        f"{STORES}/test_mapped_disk.py::test_the_whole_file_is_reserved_at_once",
    ),
    Mutant(
        "a checkpoint leaves its rows changed",
        "for store in self._stores: store.settle()",
        "pass",
        f"{LIVES}[0]",
    ),
    Mutant(
        "a row file is named before it is on the disk",
        'file.sync() crash_point("row file written")',
        'pass\n        crash_point("row file written")',
        POWER_LOSS,
    ),
    Mutant(
        "the dense file is named before it is on the disk",
        "dense.sync()",
        "pass",
        POWER_LOSS,
    ),
    Mutant(
        "a manifest is renamed before it is on the disk",
        "file.write(render(manifest)) yield True file.sync()",
        "file.write(render(manifest))",
        POWER_LOSS,
    ),
    Mutant(
        "a manifest names files of a folder that is not on the disk",
        "yield from self._sync_folders(folder)",
        "yield True",
        POWER_LOSS,
    ),
    Mutant(
        "a checkpoint more than asked for stays",
        "if manifest is not None][: n - 1]",
        "if manifest is not None][:n]",
        f"{WRITER}::test_so_many_checkpoints_stay_and_each_of_them_is_whole",
    ),
    Mutant(
        "the oldest value of a row wins a merge",
        "for layer in reversed(layers)]",
        "for layer in layers]",
        f"{WRITER}::test_deltas_with_more_rows_than_the_base_are_merged_into_one",
    ),
    Mutant(
        "a dense side that changed on its way becomes a checkpoint",
        "if dense.checksum != item.dense_checksum:",
        "if not dense.checksum:",
        f"{WRITER}::test_a_dense_side_that_arrives_changed_never_becomes_a_checkpoint",
    ),
    Mutant(
        "a queue of rows has no room again once it was full",
        "self._taken_bytes += item.nbytes",
        "pass",
        f"{WRITER}::test_a_full_queue_takes_nothing_until_something_was_written",
    ),
    Mutant(
        "rows that no layer has keep what was trained",
        "if len(keys): store.forget(keys)",
        "if len(keys):\n            pass",
        f"{RESTORE}::test_only_rows_that_changed_are_written_and_new_ones_forgotten",
    ),
    Mutant(
        "a damaged row file is restored",
        "found = size, xxhash.xxh3_64_hexdigest(content.data)",
        "found = size, file.checksum",
        f"{DAMAGE}::test_flipped_bits_are_detected_and_never_restored",
    ),
    Mutant(
        "an error of the data set is swallowed",
        "except RowcastError as error: parcels.send(pipe, error)",
        "except RowcastError:\n            parcels.send(pipe, EndOfBatches())",
        "tests/readers/test_worker.py::test_a_data_error_arrives_after_the_batches_before_it",
    ),
    Mutant(
        "an id may be as large as its table",
        "ids.view(np.uint64) >= np.repeat",
        "ids.view(np.uint64) > np.repeat",
        "tests/readers/test_parquet.py",
    ),
    Mutant(
        "every epoch is shuffled alike",
        "[seed, epoch * 2**32 + block]",
        "[seed, block]",
        "tests/readers/test_conformance.py::test_a_shuffle_permutes_each_block_by_philox_of_seed_epoch_and_block",
    ),
    Mutant(
        "a run that goes on waits for the first decoder",
        "self._next_step = (start or Position()).step",
        "self._next_step = 0",
        "tests/readers/test_worker.py::test_a_run_goes_on_where_another_stopped",
    ),
    Mutant(
        "an evaluation comes a step early",
        "at.train_step % self._eval_every == 0",
        "(at.train_step + 1) % self._eval_every == 0",
        "tests/readers/test_schedule.py::test_evaluations_follow_every_n_steps_and_each_epoch_but_never_twice",
    ),
)

TRAINER = (
    Mutant(
        "a fill does not wait for the victims' last step",
        'fill.wait(self._computed[after], "fill_after")',
        "pass",
        f"{WAITS}[0]",
    ),
    Mutant(
        "a fill is issued before the step that it waits for",
        "after > self._last_issued",
        "after > self._last_issued + 1",
        f"{WAITS}[0]",
    ),
    Mutant(
        "a fill does not wait for the copy to staging",
        'fill.wait(arrived.copied[message.piece], "copied")',
        "pass",
        f"{WAITS}[0]",
    ),
    Mutant(
        "rows are copied over rows still in fill staging",
        'stream.wait(room.after, "fill_staging")',
        "pass",
        f"{WAITS}[0]",
    ),
    Mutant(
        "victims are gathered over victims still in evict staging",
        'self._streams.fill.wait(room.after, "evict_staging")',
        "pass",
        f"{WAITS}[0]",
    ),
    Mutant(
        "a look-up does not wait for its rows",
        'self._streams.compute.wait(step.filled[-1], "filled")',
        "pass",
        f"{WAITS}[0]",
    ),
    Mutant(
        "victims are copied home before they are gathered",
        'stream.wait(task.gathered, "gathered")',
        "pass",
        f"{WAITS}[0]",
    ),
    Mutant(
        "rows are announced before they are in the ring",
        'if not self._streams.done(flight.task.room.used, "sent"):',
        "if not flight.task:",
        f"{WAITS}[0]",
    ),
    Mutant(
        "the ring is released before it was copied",
        'self._streams.done(self._copying[0][1], "released")',
        "self._copying[0]",
        f"{WAITS}[0]",
    ),
    Mutant(
        "a script's own streams are not waited for",
        'self._compute.wait(event, "used")',
        "pass",
        "tests/adopt/test_streams.py::test_every_use_of_a_step_is_awaited_before_the_step_is_reported",
    ),
    Mutant(
        "a place in staging is taken again while it is in use",
        "span.begin < begin + size - self.nbytes",
        "span.begin < begin - self.nbytes",
        "tests/trainer/test_staging.py",
    ),
    Mutant(
        "arrays of a plan are overwritten by a later plan's",
        "streams.allocate(0) for _ in range(depth + 2)",
        "streams.allocate(0) for _ in range(depth)",
        f"{WAITS}[0]",
    ),
    Mutant(
        "the bytes before a piece's rows are staged too",
        "message.payload.nbytes - message.rows[0].offset",
        "message.payload.nbytes",
        f"{WAITS}[0]",
    ),
    Mutant(
        "later victims are gathered from the first ones' slots",
        '.evict_slots"][span.start : span.start + span.count]',
        '.evict_slots"][: span.count]',
        f"{WAITS}[0]",
    ),
    Mutant(
        "later rows are filled into the first ones' slots",
        '.fetch_slots"][span.start : span.start + span.count]',
        '.fetch_slots"][: span.count]',
        f"{WAITS}[0]",
    ),
    Mutant(
        "a step is done before its last victims are home",
        "task.step <= step for task in heads",
        "task.step < step for task in heads",
        f"{WAITS}[0]",
    ),
    Mutant(
        "the dense side goes home before the barrier's rows",
        "if not self._dense or self._tasks or self._copying:",
        "if not self._dense:",
        f"{LIVES}[0]",
    ),
    Mutant(
        "an evaluation does not end where training goes on",
        'if self._evaluating and step.header.kind == "train":',
        "if False:",
        f"{EXACT}[sgd-single-1]",
    ),
    Mutant(
        "a run that goes on forgets the random numbers",
        "restore_random(self.device, tensors)",
        "pass",
        f"{LIVES}[0]",
    ),
    Mutant(
        "a run that goes on forgets the dense optimizer",
        "restore_optimizer(self.model, self._side.optimizer, tensors)",
        "pass",
        f"{LIVES}[0]",
    ),
    Mutant(
        "a run that goes on forgets its evaluations",
        "self.restore_evaluations(tensors)",
        "pass",
        "tests/telemetry/test_history.py::test_all_evaluations_come_back_from_a_checkpoint",
    ),
    Mutant(
        "a loss that is not a number is passed over",
        "if not math.isfinite(loss):",
        "if loss is None:",
        "tests/system/test_bad_input.py::test_a_loss_that_is_not_finite_ends_both_naming_the_train_step",
    ),
    Mutant(
        "a dense side of other bytes is taken",
        "if found != message.checksum:",
        "if not found:",
        "tests/hostile/test_peers.py::test_a_dense_side_whose_checksum_is_of_other_bytes_is_refused",
    ),
    Mutant(
        "a slot beyond the cache is looked up",
        'below(own["slots"], most, f"{name}.slots")',
        "pass",
        "tests/hostile/test_peers.py::test_a_trainer_ends_with_a_sentence_when_its_prefetcher_sends[a look-up far outside]",
    ),
    Mutant(
        "an empty bag is divided by its look-ups",
        "counts.clamp(min=1)",
        "counts",
        "tests/trainer/test_embedding.py::test_bags_are_summed_or_averaged_and_empty_bags_are_zero",
    ),
    Mutant(
        "the bias correction of Adam is a step behind",
        "step=train_step + 1,",
        "step=max(1, train_step),",
        "tests/trainer/test_row_optimizers.py::test_touched_rows_end_with_the_bits_of_the_whole_table",
    ),
    Mutant(
        "Adagrad divides by the sum of squares itself",
        "state.sqrt().add_(rule.eps), value=-rule.lr",
        "state.add(rule.eps), value=-rule.lr",
        "tests/trainer/test_row_optimizers.py::test_touched_rows_end_with_the_bits_of_the_whole_table",
    ),
    Mutant(
        "row-wise Adagrad takes the sum of squares",
        "state += (row_grads * row_grads).mean(1, keepdim=True)",
        "state += (row_grads * row_grads).sum(1, keepdim=True)",
        "tests/trainer/test_row_optimizers.py::test_touched_rows_end_with_the_bits_of_the_whole_table",
    ),
    Mutant(
        "a compiled step of SGD is rounded twice",
        "multiply_add(scratch[U(c)], -rate.lr, weights.flat[row + U(c)])",
        "weights.flat[row + U(c)] - rate.lr * scratch[U(c)]",
        "tests/kernels/test_compiled.py::test_steps_have_the_bits_of_torch",
    ),
    Mutant(
        "a compiled gradient is weighted before it is divided",
        "out[at + U(c)] += grads.flat[grad + U(c)] / divisor * weight",
        "out[at + U(c)] += grads.flat[grad + U(c)] * weight",
        "tests/kernels/test_compiled.py::test_steps_have_the_bits_of_torch",
    ),
    Mutant(
        "an error in a kernel's thread is swallowed",
        "work(*first_range) for task in running: task.result()",
        "work(*first_range)",
        "tests/kernels/test_compiled.py::test_an_error_in_a_thread_is_raised_for_the_caller",
    ),
    Mutant(
        "a Triton kernel divides by the root alone",
        "new = old + tl.div_rn(grads * -rate, tl.sqrt_rn(state) + EPS)",
        "new = old + tl.div_rn(grads * -rate, tl.sqrt_rn(state))",
        "tests/kernels/test_triton.py::test_a_step_of_the_rows_has_the_bits_of_torch",
    ),
    Mutant(
        "the rest of an epoch is shown twice",
        "self.completed <= start.epoch",
        "self.completed < start.epoch",
        "tests/adopt/test_epoch_count.py",
    ),
    Mutant(
        "the last micro-batch is left out",
        "width = -(-batch_size // number)",
        "width = batch_size // number",
        "tests/adopt/test_slices.py::test_a_batch_is_cut_as_torch_chunk_cuts",
    ),
    Mutant(
        "gradients of two batches are accumulated",
        "not self.is_trained and self._count_at_training == count",
        "False",
        "tests/adopt/test_module.py::test_gradients_are_not_accumulated_over_batches",
    ),
)

DEPLOY = (
    Mutant(
        "a port that nobody serves is healthy",
        "len(statuses) >= expected and set(statuses)",
        "set(statuses)",
        "tests/deploy/test_health.py::test_a_port_that_was_named_must_be_served",
    ),
    Mutant(
        "the launcher ends with another code than its child",
        "error.exit_code = child.code or 1",
        "error.exit_code = 1",
        "tests/system/test_stopping.py::test_the_launcher_passes_on_the_code_and_the_sentence_of_the_prefetcher",
    ),
    Mutant(
        "one healthy process of two is enough",
        "set(statuses) == {200}",
        "200 in statuses",
        "tests/deploy/test_health.py::test_two_processes_on_one_network_must_both_be_healthy",
    ),
)

MUTANTS = (*PROTOCOL, *PREFETCHER, *TRAINER, *DEPLOY)
