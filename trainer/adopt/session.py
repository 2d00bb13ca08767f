"""One adopted run: a prefetcher, the engine in this process, and the step that the script has in hand.

    peek    drives the engine until the next step's rows are here, or the data has ended     (between two steps)
    begin   the script may look the step up
    finish  its compute was issued; the engine reports it when the device has done it

All is called by the script's thread. The mail, the sender and the watch have threads of their own, which stop with the session.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch

from protocol.child import Child
from protocol.conversation import Conversation
from protocol.errors import ConfigError, PeerLost, RowcastError, peer_failure
from protocol.job import Job
from protocol.manifest import newest_checkpoint, read_manifest
from protocol.messages import Bye, Welcome
from protocol.position import Position
from protocol.process import Crew, tell_peer
from protocol.rundir import RunDirectory
from protocol.session import Session as Protocol
from protocol.session import check_welcome
from protocol.stages import IDLE_WAIT_S, Doorbell
from protocol.tables import group_specs
from protocol.telemetry.logs import get_logger
from protocol.transport.zmq_link import ZmqLink
from protocol.watch import PeerWatch, Progress
from trainer.adopt.dense import DenseSide
from trainer.adopt.loss_scaling import LossScaling
from trainer.adopt.optimizer_steps import OptimizerSteps
from trainer.adopt.script_side import ScriptResults, ScriptRunner
from trainer.adopt.slices import Slice, SlicedStep, slices_of
from trainer.adopt.telling import tell
from trainer.adopt.uses import Uses
from trainer.cache import ArrivedStep
from trainer.embedding import Embeddings
from trainer.encounter import attach_rings, await_welcome, hello, make_engine, make_records, progress_of
from trainer.engine import TrainerEngine
from trainer.kernels import Kernels, torch_ops
from trainer.kernels.choose import choose_kernels
from trainer.metrics import new_counters
from trainer.models.sequences import Embedded
from trainer.observe import stall_clocks
from trainer.pinning import pinned
from trainer.plan_check import check_welcome_fits
from trainer.runner import step_lookups
from trainer.streams import adopted_streams, on_device

DEVICE_POLL_S = 0.0002
CHILD_END_S = 15.0  # for a prefetcher that knows that it is over
LOST_CHILD_S = 3.0  # for one that seems to be gone to be seen to have ended
CHECKPOINT_POLL_S = 0.02
ACCUMULATED = (
    "two train batches were looked up without a step of the dense optimizer between them: rows are updated in every backward pass, so "
    "accumulated gradients would train them more often than the dense weights; use larger batches, which connect(..., accumulate=k) "
    "yields as k micro-batches each, or connect(..., dense_optimizer=False) where no torch.optim optimizer is used"
)
STEPPED_WITHIN = (
    "an optimizer has stepped between two micro-batches of train step {}: with accumulate={} the gradients of all of them make one step; "
    "call optimizer.step() and zero_grad() where batch.is_last"
)
FORGOTTEN = (
    "train step {} was looked up in eval mode alone, and an optimizer has stepped: its rows were not trained; call model.train() "
    "before it, or look up under torch.no_grad() where the rows are to stay as they are"
)
LEFT_BETWEEN_EPOCHS = "the training script has left the loader between two epochs: one `for` loop over it is one epoch"


@dataclass(frozen=True, kw_only=True)
class SessionParts:
    job: Job
    device: torch.device
    start_child: Callable[[], Child] | None  # None: a prefetcher runs already, or will
    dense: DenseSide | None
    dense_optimizer: bool  # it must step once for each train batch
    evaluate: bool = False  # evaluation batches are yielded too
    accumulate: int = 1  # micro-batches that each batch is yielded as


class Session:
    def __init__(self, parts: SessionParts) -> None:
        self.current: ArrivedStep | None = None  # begun, and not finished
        self.slice = Slice(0, 0, 0, is_last=True)  # of the step in hand, that the script was given last
        self.is_trained = False  # whether the step in hand was looked up to be trained
        self.train_steps = 0  # of the run, that were finished
        self.ended = False  # everything is home and on disk, and both have said good-bye
        self._parts = parts
        self._job = parts.job
        self._groups = group_specs(parts.job)
        self._bell = Doorbell()
        self._crew = Crew("trainer", self._bell, owns_process=False)
        self._counters = new_counters(self._groups)
        self._stack = ExitStack()
        self._conversation: Conversation | None = None
        self._engine: TrainerEngine | None = None
        self._embeddings: Embeddings | None = None
        self._uses: Uses | None = None
        self._slices: deque[Slice] = deque()  # of the step in hand, that follow
        self._sliced: SlicedStep | None = None  # the step in hand, where it has several slices
        self.welcome: Welcome | None = None  # of the prefetcher, once it has come
        self._start: Position | None = None  # of the checkpoint that the run goes on from; None where the first `for` has found its epoch
        self._kernels: Kernels = torch_ops
        self._child: Child | None = None
        self._next: ArrivedStep | None = None  # taken, and not begun
        self._epoch: int | None = None  # of the last step begun
        self._follows_barrier = False  # the step in hand
        self._steps = OptimizerSteps()
        self._stack.callback(self._steps.close)
        self._stack.callback(LossScaling(lambda: self._embeddings is not None and self.awaits_backward).close)
        self._steps_seen: int | None = None  # of dense optimizers, at the last forward that trained
        self._is_slice_trained = False  # whether the slice in hand was looked up to be trained
        self._steps_looked_at: int | None = None  # and when the step in hand was only looked up, though gradients were enabled
        self._turn_s = time.monotonic()  # when the script was last known to have its turn
        self._script_has_turn = False
        self._pid = os.getpid()
        self._closed = False

    # from nothing to an engine

    def open(self) -> None:
        """Raises RowcastError; then everything is closed again."""
        with self._in_engine():
            self._stack.enter_context(RunDirectory(self._job.run_dir, "trainer"))
            if self._parts.start_child is not None:
                self._child = self._parts.start_child()
                self._stack.callback(self._child.see_out, CHILD_END_S)
            self._kernels = choose_kernels(self._parts.device, self._job)  # while the prefetcher prepares, too
            self._meet()

    def _meet(self) -> None:
        link = ZmqLink.trainer(self._job.run_dir, on_receive=self._bell.ring, transport=self._job.transport)
        self._stack.callback(link.close)
        link.start()
        conversation = self._conversation = Conversation(Protocol("trainer"), link)
        arrived: list[Welcome] = []
        left = threading.Event()
        conversation.listen({Welcome: arrived.append, Bye: lambda message: left.set()})
        watch = PeerWatch("prefetcher", conversation, link, self._job.transport, self._progress, lambda: bool(arrived))
        conversation.send(hello(self._job, "train", torch.get_num_threads(), self._parts.device))
        welcome = await_welcome(arrived, conversation, watch, self._bell, lambda: False, lambda: left.is_set() or self._child_ended())
        if welcome is None:
            raise PeerLost("the prefetcher was stopped before the run had begun")
        check_welcome_fits(welcome, self._job, self._groups)
        check_welcome(welcome)
        self._check_resume(welcome)
        if self._parts.evaluate and welcome.epoch_batches[1] == 0:
            raise ConfigError(
                "connect: evaluate=True, but the data set has no evaluation batches; let the factory return a function of "
                '(split, epoch) that knows the split "eval"'
            )
        self._start, self.welcome = self._position_of(welcome), welcome
        if welcome.pairing:
            tell(f"ids come by position: {welcome.pairing}")
        self._make_engine(conversation, watch, welcome)

    def _child_ended(self) -> bool:
        return self._child is not None and self._child.code is not None

    def _check_resume(self, welcome: Welcome) -> None:
        if welcome.first_train_step and self._parts.dense is None:
            raise ConfigError(
                f"the run in {self._job.run_dir} goes on after {welcome.first_train_step} train steps, but the model and its optimizer "
                "begin anew; connect with dense=(model, optimizer), or with fresh=True"
            )

    def _position_of(self, welcome: Welcome) -> Position | None:
        folder = newest_checkpoint(self._job.run_dir) if welcome.first_train_step else None
        position = None if folder is None else read_manifest(folder).position
        return position if position is not None and position.train_step == welcome.first_train_step else None

    def _make_engine(self, conversation: Conversation, watch: PeerWatch, welcome: Welcome) -> None:
        device = self._parts.device
        rings = attach_rings(self._stack, self._job.transport, welcome)
        self._crew.start({"watch": watch}, {})
        self._stack.callback(self._crew.stop)
        are_pinned = self._stack.enter_context(pinned([ring.buffer for ring in rings], device))
        records = make_records(welcome.slots, self._groups, device)
        streams = adopted_streams(device)
        engine = make_engine(
            self._job,
            self._groups,
            conversation,
            welcome,
            rings,
            pinned=are_pinned,
            streams=streams,
            records=records,
            runner=ScriptRunner(self._parts.dense),
            results=ScriptResults(),
            counters=self._counters,
        )
        self._engine, self._uses = engine, Uses(streams.compute)
        self._embeddings = Embeddings(self._groups, self._job.optimizer.sparse, records, self._kernels, self._uses.lap)
        self.train_steps = welcome.first_train_step
        self._crew.start({"mail": engine.conversation, "sender": engine.sender}, stall_clocks(engine))
        self._stack.callback(self._crew.stop)  # once more: before the rings are unpinned

    @property
    def embeddings(self) -> Embeddings:
        assert self._embeddings is not None, "a session that was opened has an engine"
        return self._embeddings

    @property
    def uses(self) -> Uses:
        assert self._uses is not None, "a session that was opened has an engine"
        return self._uses

    def epoch_batches(self) -> tuple[int | None, int | None]:
        """Train and evaluation batches of an epoch, where the data set knows."""
        assert self.welcome is not None, "a session that was opened has met its prefetcher"
        train, evaluation = self.welcome.epoch_batches
        most = self.welcome.train_steps  # max_steps may end the run within its first epoch
        return (train if train is None or most is None else min(train, most)), evaluation

    # step by step

    @property
    def epoch(self) -> int:
        """Of the step in hand, or of the one that was finished last; 0 before the first."""
        return self._epoch or 0

    @property
    def awaits_backward(self) -> bool:
        """Whether what was looked up last to be trained has had no backward pass."""
        return self.embeddings.awaits_backward if self._sliced is None else self._sliced.awaits_backward

    def look_up(self) -> list[Embedded]:
        """Of the slice in hand, by feature; with gradients enabled its backward pass trains the rows."""
        assert self.current is not None, "the module looks up the step in hand"
        if self._sliced is not None:
            return self._sliced.look_up(self.slice)
        return self.embeddings(step_lookups(self.current), self.current.header.train_step)

    def next_slice(self) -> Slice | None:
        """The next micro-batch of the step in hand is the script's now; None where it has had all."""
        if not self._slices or self.current is None:
            return None
        self._require_backward(self.current)
        self._is_slice_trained = False
        self.slice = self._slices.popleft()
        return self.slice

    def take_empty_rest(self, first: ArrivedStep) -> bool:
        """Whether the checkpoint that the run goes on from stands at the end of an epoch, of which nothing follows: its `first` step is of
        the next one. Once True, never again."""
        start, self._start = self._start, None
        return start is not None and (start.epoch < first.header.epoch or start.train_batch == 0)

    def look_at_in_hand(self) -> None:
        """The step in hand is looked up in eval mode, with gradients enabled: right for a prediction, wrong where it is trained by that."""
        assert self.current is not None, "the module looks up the step in hand"
        if self.current.header.kind == "train" and self._steps_looked_at is None:
            self._steps_looked_at = self._steps.count

    def train_in_hand(self) -> None:
        """The step in hand is looked up to be trained. Raises RuntimeError where it must not be."""
        assert self.current is not None, "the module looks up the step in hand"
        header, counted = self.current.header, self._steps.count
        if header.kind == "eval":
            raise RuntimeError(
                "this is an evaluation batch, whose rows may not change: call model.eval(), or look up under torch.no_grad()"
            )
        if self._is_slice_trained and not self.awaits_backward:
            raise RuntimeError(f"the rows of train step {header.train_step} were updated already; train on each batch once")
        if self._parts.dense_optimizer and not self.is_trained and self._steps_seen == counted:
            raise RuntimeError(ACCUMULATED)
        if self._parts.dense_optimizer and self.is_trained and self._steps_seen != counted:
            raise RuntimeError(STEPPED_WITHIN.format(header.train_step, self._parts.accumulate))
        self.is_trained, self._is_slice_trained, self._steps_seen = True, True, counted

    def peek(self) -> ArrivedStep | None:
        """Finishes the step in hand and waits for the next; None where the data has ended, and the session with it. Raises RowcastError."""
        self.finish()
        if self._next is None and not self.ended:
            self._script_has_turn = False
            with self._in_engine():
                self._next = self._drive()
            self._turn_s, self._script_has_turn = time.monotonic(), True
        return self._next

    def begin(self) -> ArrivedStep:
        """The step that `peek` has found is the script's now."""
        step, self._next = self._next, None
        assert step is not None, "peek comes before begin"
        assert self._engine is not None, "a session that was opened has an engine"
        self._follows_barrier, self.is_trained = self._engine.loop.stop_reason is not None, False
        self._steps_looked_at, self._is_slice_trained = None, False
        self._engine.loop.begin(step)
        self._slices = deque(slices_of(step.header.batch_size, self._parts.accumulate))
        is_whole = len(self._slices) == 1
        self._sliced = None if is_whole else SlicedStep(self.embeddings, self.uses, step_lookups(step), step.header.train_step)
        self.current, self._epoch = step, step.header.epoch
        return step

    def finish(self) -> None:
        """Raises RuntimeError where the step was not trained as the script seems to mean it."""
        step = self.current
        if step is None:
            return
        self._require_backward(step)
        is_stepped = self._steps_looked_at is not None and self._steps_looked_at < self._steps.count
        if is_stepped and not self.is_trained and self._parts.dense_optimizer:
            raise RuntimeError(FORGOTTEN.format(step.header.train_step))
        assert self._engine is not None, "a session that was opened has an engine"
        if self._sliced is not None:
            self._sliced.finish()
        self.current, self._sliced = None, None
        self.uses.gather()
        self.train_steps += step.header.kind == "train"
        self._engine.loop.finish(step, None)
        self._bell.ring()

    def _require_backward(self, step: ArrivedStep) -> None:
        if self.awaits_backward:
            raise RuntimeError(
                f"the embeddings of train step {step.header.train_step} have had no backward pass; call backward() once for each forward, "
                "or look up under torch.no_grad()"
            )

    def _drive(self) -> ArrivedStep | None:
        engine = self._engine
        if engine is None or self._closed:
            raise RuntimeError("the loader was closed; connect again to train on")
        while not engine.finished:
            seen = self._bell.rings
            self._crew.check()
            if engine.loop.attend():
                self._bell.ring()
                continue
            step = engine.loop.take()
            if step is not None:
                return step
            began_s = time.perf_counter()
            self._bell.wait(seen, IDLE_WAIT_S if self._parts.device.type == "cpu" else DEVICE_POLL_S)
            engine.loop.idled(time.perf_counter() - began_s)
        self._end(engine)
        return None

    def _progress(self) -> Progress:
        """A script may take as long as it likes for a step: while it has its turn, that is progress."""
        if self._script_has_turn:
            self._turn_s = time.monotonic()
        progress = progress_of(self._engine)
        waiting_for = "the training script" if self._script_has_turn else progress.waiting_for
        return replace(progress, work=progress.work + int(self._turn_s), waiting_for=waiting_for)

    # checkpoints

    def checkpoint_here(self) -> str | None:
        """The name of the checkpoint that holds the tables as they are now, once it is on disk; None where the plans have none here. A step
        in hand that was trained is finished for it."""
        waits_for_step = self._parts.dense_optimizer and self._steps_seen == self._steps.count
        if self.current is not None and self.is_trained and waits_for_step and self._parts.dense is not None:
            raise RuntimeError("a checkpoint of dense=... belongs behind optimizer.step(): call state_dict() after it")
        if self.current is None or (self.is_trained and not self._slices):
            self.peek()
        while (found := self._checkpoint_at(self.train_steps)) is None and self._is_being_written():
            self._crew.check()
            time.sleep(CHECKPOINT_POLL_S)
        return found

    def _checkpoint_at(self, train_steps: int) -> str | None:
        folder = newest_checkpoint(self._job.run_dir)
        return folder.name if folder is not None and read_manifest(folder).train_steps == train_steps else None

    def _is_being_written(self) -> bool:
        """Whether a checkpoint was taken right before the step in hand, or before the next one, which may not be on disk yet."""
        if self.ended or self._engine is None:
            return False
        return self._follows_barrier if self.current is not None else self._engine.loop.stop_reason is not None

    # the end

    def _end(self, engine: TrainerEngine) -> None:
        end = engine.loop.end
        assert end is not None, "the loop ends with EndOfData"
        self._crew.stop()  # nothing may follow the good-bye, no heartbeat either
        engine.say_bye()
        self.ended = True
        self._close_stack()
        if not end.finished:
            raise RowcastError(
                f"the prefetcher was stopped ({engine.loop.stop_reason}) after {self.train_steps} train steps; its checkpoint in "
                f"{self._job.run_dir} is where connect(fresh=False, dense=...) goes on"
            )

    def leave(self) -> None:
        """Whatever the script still had to do: both processes end. Idempotent, and nothing in a process that was forked from this one."""
        if self._closed or self._pid != os.getpid():
            return
        if self._next is not None and self._epoch is not None and self._next.header.epoch != self._epoch:
            get_logger().warning(LEFT_BETWEEN_EPOCHS, epochs=self._job.data.epochs, done=self._epoch + 1)
        self._tell(RowcastError(f"the training script left its loop after {self.train_steps} train steps"))
        self._close_stack()

    @contextmanager
    def _in_engine(self) -> Iterator[None]:
        """Whatever mode and device the script is in. Errors close everything."""
        try:
            with torch.inference_mode(False), on_device(self._parts.device):
                yield
        except BaseException as error:  # noqa: BLE001 - whatever it is, both sides end with it
            raise self._failed(error) from None

    def _failed(self, error: BaseException) -> BaseException:
        """Closes everything; what the script is told."""
        if self._closed:
            return error
        self._tell(error)
        if isinstance(error, PeerLost) and self._child is not None and self._child.ended_within(LOST_CHILD_S):
            error = peer_failure(self._child.code or 1, self._child.obituary())
        self._close_stack()
        return error

    def _tell(self, error: BaseException) -> None:
        if self._conversation is not None:
            tell_peer(self._conversation, error)

    def _close_stack(self) -> None:
        self._closed = True
        self.current = self._next = None
        self._stack.close()
