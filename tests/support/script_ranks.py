"""Training scripts of `rowcast.connect` on several ranks in one process: the seed orders the turns of all.

A script has a thread, which runs only while `Script.advance` waits for it: so one thread of all works at a time. Where
the product would wait for other ranks, the script gives its turn away until what it waits for is there. One such wait
can be left out, to show that it is needed.
"""

import gc
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

import rowcast
from rowcast.job.schema import Job
from rowcast.protocol.batch import ScheduledBatch
from rowcast.protocol.conversation import Conversation
from rowcast.protocol.messages import StopRequest, Welcome
from rowcast.protocol.parts import Rank
from rowcast.runtime.run_directory import pair_folder
from rowcast.trainer.adopt.connect.batch import LoadedBatch
from rowcast.trainer.adopt.connect.loader import Loader
from rowcast.trainer.adopt.connect.rank_session import RankSession
from rowcast.trainer.adopt.connect.script_run import ScriptRun, SessionParts
from rowcast.trainer.adopt.connect.script_state import ScriptState
from rowcast.trainer.adopt.ranks import OPEN
from rowcast.trainer.device.streams import PlainStreams, Streams
from rowcast.trainer.kernels import torch_ops
from rowcast.trainer.models.job_model import JobModel
from rowcast.trainer.models.ordered import sum_in_order
from rowcast.trainer.step.engine import TrainerEngine
from tests.support.collectives import Call, InProcessCollectives, Network
from tests.support.driver import InProcessRun, Past, RecordedResults, Settings, Sharing
from tests.support.planner_integrity import check_planner
from tests.support.ranked_run import RankedRun

LOADER = "rowcast.trainer.adopt.connect"
Place = tuple[str, int]  # what is exchanged or told, and the number of the exchange among those under this name
GATHERED = "what ranks gather over the store of their meeting"


class Left(BaseException):
    """Ends the thread of a script whose run the test gives up."""


class Script:
    """Implements a stage, and `streams.Work.wait` and the like for what runs in it."""

    def __init__(self, work: Callable[[], object], number: int) -> None:
        self.finished = False
        self.number, self.session = number, None
        self._work = work
        self._ready: Callable[[], bool] = lambda: True
        self._moved, self._is_left = True, False
        self._error: BaseException | None = None
        self._goes, self._rests = threading.Semaphore(0), threading.Semaphore(0)
        self._random = torch.Generator().manual_seed(number).get_state()  # torch's, which ranks in one process share
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def advance(self) -> bool:
        """Runs the script until it gives its turn away. Raises its error."""
        if self.finished or not self._ready():
            return False
        OPEN.sort(key=lambda session: session is self.session)  # the newest is that of `sum_gradients`
        torch.set_rng_state(self._random)
        self._goes.release()
        self._rests.acquire()
        self._random = torch.get_rng_state()
        if self._error is not None:
            raise self._error
        return self._moved

    def turn(self, ready: Callable[[], bool] = lambda: True, *, moved: bool = True) -> None:
        """In the script: lets others work, at least until `ready`. `moved`: whether it did anything since the last."""
        self._ready, self._moved = ready, moved
        self._rests.release()
        self._goes.acquire()
        if self._is_left:
            raise Left

    def leave(self) -> None:
        self._is_left = True
        self._goes.release()
        self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(1)
        self._goes.acquire()
        try:
            if not self._is_left:
                self._work()
        except BaseException as error:  # noqa: BLE001 - it is raised where the script is advanced
            self._error = error
        self.finished = self._moved = True
        self._rests.release()


class Awaited:
    """The work of a collective, for which a script waits. Implements `streams.Work`."""

    def __init__(self, call: Call, script: Script, *, is_left_out: bool) -> None:
        self._call, self._script, self._is_left_out = call, script, is_left_out

    def is_completed(self) -> bool:
        return self._call.is_completed()

    def wait(self) -> object:
        if not self._is_left_out:
            self._script.turn(self._call.is_completed)
        return None


class ScriptCollectives(InProcessCollectives):
    """Stands in for those on the script's process group."""

    leaves_work = False

    def __init__(self, network: Network, rank: int, script: Script, without: Place | None) -> None:
        self.places: set[Place] = set()  # of all calls
        self._script, self._without = script, without
        super().__init__(network, rank)

    @property
    def doing(self) -> str:
        return self._doing

    @doing.setter
    def doing(self, what: str) -> None:
        self._doing, self._number = re.sub(r" \d+$", "", what), 0

    def _call(self, name: str, given: Sequence[Tensor], taken: Sequence[Tensor]) -> Any:
        place, self._number = (self._doing, self._number), self._number + 1
        self.places.add(place)
        call = super()._call(name, given, taken)
        return Awaited(call, self._script, is_left_out=place == self._without)


class ScriptGroup:
    """Implements `rank_group.Group` after its ranks have met."""

    def __init__(self, rank: Rank, rooms: list[dict[int, bytes]], script: Script, *, waits: bool) -> None:
        """`rooms`: of all ranks, one for each call."""
        self.rank, self._rooms, self._script, self._waits = rank, rooms, script, waits
        self._num_calls = 0

    def gather(self, content: bytes) -> list[bytes]:
        while len(self._rooms) <= self._num_calls:
            self._rooms.append({})
        room, self._num_calls = self._rooms[self._num_calls], self._num_calls + 1
        room[self.rank.number] = content
        if self._waits:
            self._script.turn(lambda: len(room) == self.rank.count)
        return [room.get(rank, b"") for rank in range(self.rank.count)]

    def abandon(self, device: torch.device) -> None:
        pass


class PairedRun(ScriptRun):
    """The run of a script whose prefetcher is in this process."""

    def __init__(self, parts: SessionParts, pair: "ScriptPair") -> None:
        super().__init__(parts)
        self._pair = pair

    def open(self) -> Welcome:
        pair = self._pair
        self.kernels: Any = torch_ops  # without a wait they may be given nonsense, and must check it
        self._group: Any = pair.group
        self.connection.welcome = pair.welcome
        self.connection.drive = self._drive  # type: ignore[method-assign]
        self.resumes = pair.welcome.first_train_step > 0
        return pair.welcome

    def start(self, welcome: Welcome, state: ScriptState) -> TrainerEngine:
        self.connection.stack.enter_context(self.results)
        self.train_steps = welcome.first_train_step
        engine = self.connection.engine = self._pair.trainer
        return engine

    def _drive(self, advance: Callable[[], bool], until: Callable[[], bool]) -> None:
        while not until():
            self._pair.script.turn(moved=advance())


class ScriptPair(InProcessRun):
    """A prefetcher, and a script that trains the job's model as `trainer run` does."""

    group: ScriptGroup
    welcome: Welcome
    session: RankSession

    def __init__(
        self,
        ranks: "ScriptRanks",
        job: Job,
        batches: Sequence[ScheduledBatch],
        settings: Settings,
        past: Past | None,
        sharing: Sharing,
    ) -> None:
        rank = sharing.rank
        self.script = Script(self._train, rank.number)
        self.collectives = ScriptCollectives(ranks.network, rank.number, self.script, ranks.without)
        self.group = ScriptGroup(rank, ranks.rooms, self.script, waits=ranks.without != (GATHERED, 0))
        self._ranks = ranks
        self.own_losses: list[Tensor] = []  # this rank's addends of each train step's
        super().__init__(job, batches, settings, past, sharing)
        stages = [stage for name, stage in self.trainer.stages.items() if name != "loop"]
        self.advances = [*self.prefetcher.stages.values(), *stages, self.script.advance]

    def make_streams(self, settings: Settings) -> Streams:
        return PlainStreams()

    def make_trainer(
        self, welcome: Welcome, conversation: Conversation, sharing: Sharing | None, rank: Rank, num_dense: int
    ) -> TrainerEngine:
        self.runner = JobModel(self.job, num_dense, parts=rank.parts)
        pair_folder(self.job.run_dir, rank.number, rank.count).mkdir(parents=True)
        numbers = {"RANK": rank.number, "WORLD_SIZE": rank.count, "LOCAL_RANK": rank.number}
        with pytest.MonkeyPatch.context() as patched:
            for name, number in {**numbers, "LOCAL_WORLD_SIZE": rank.count, "MASTER_PORT": 1}.items():
                patched.setenv(name, str(number))
            patched.setattr(f"{LOADER}.session.ScriptRun", lambda parts: PairedRun(parts, self))
            patched.setattr(f"{LOADER}.rank_session.ScriptCollectives", lambda *arguments: self.collectives)
            self.embeddings = self._ranks.embeddings()
            dense = self.runner.model, self.runner.dense_step.objects[0]
            self.loader = rowcast.connect(self.embeddings, self.job.data.format, evaluate=True, dense=dense)
        session: Any = self.loader._session
        self.session = self.script.session = session
        self.welcome, run = welcome, session.run
        conversation.listen({StopRequest: run.connection._note_stop})
        run.connection.conversation = conversation
        return TrainerEngine(
            self.job,
            welcome,
            conversation,
            self.rings.of_trainer,
            self.streams,
            lambda records, clock: (session._script_state, None),
            run.results,
            run.connection._counters,
            rank,
        )

    def draw(self, loader: Loader) -> Iterable[LoadedBatch]:
        return loader

    def _train(self) -> None:
        loader, side = self.loader, self.runner
        for _ in loader.epochs:
            for batch in self.draw(loader):
                training = batch.kind == "train"
                with torch.set_grad_enabled(training):
                    found = self.embeddings(batch.sparse_features)
                    rows = [found[name] for name in self.job.features]
                    outputs = side.forward(batch.dense_features, rows, {}, training=training)
                if not training:
                    loader.record(logits=side.logits(outputs))
                    continue
                loss = side.loss(outputs, batch.labels)
                torch.autograd.backward(loss)
                rowcast.sum_gradients(side.model)
                side.step(batch.train_step)
                step: Any = self.session.step
                whole = step.header.share or step.header
                self.own_losses.append(loss.detach() * (step.header.batch_size / whole.batch_size))
                torch.rand(1)  # as dropout does: its random numbers are the rank's own
                self._ranks.behind(self, batch.train_step)
        self.results = RecordedResults(evaluations=list(self.session.run.results.evaluations))


class ScriptRanks(RankedRun):
    """A context manager for one whole run: each rank computes one part. The bits are the plain loop's in as many parts,
    if they are powers of two of one size."""

    def __init__(
        self,
        folder: Path,
        job: Job,
        batches: Sequence[ScheduledBatch],
        settings: Settings,
        ranks: int,
        *,
        without: Place | None = None,
        behind: Callable[[ScriptPair, int], object] = lambda pair, train_step: None,
        kind: type[ScriptPair] = ScriptPair,
    ) -> None:
        """`without`: a wait to leave out. `behind`: what the script of a pair does behind each train step."""
        own = msgspec.structs.replace(job.job, run_dir=str(folder / "run"))
        job = msgspec.structs.replace(job, job=own)
        self.without, self.behind, self._kind = without, behind, kind
        self.rooms: list[dict[int, bytes]] = []
        self.scripts: list[ScriptPair] = []
        content = msgspec.to_builtins(job, enc_hook=str)
        self._sections = {name: own for name, own in content.items() if isinstance(own, dict)}
        self._sections["metrics"].pop("trainer")  # a script serves none
        self._configs = [
            rowcast.EmbeddingBagConfig(
                name=own.name,
                num_embeddings=own.num_embeddings,
                embedding_dim=own.embedding_dim,
                feature_names=list(own.features),
                init=own.init,
                pooling=own.pooling,
                placement=own.placement,
            )
            for own in job.tables
        ]
        self._patched = pytest.MonkeyPatch()
        self._patched.setattr(f"{LOADER}.rank_session.MADE", [])
        self._patched.setattr(f"{LOADER}.loader.require_group", lambda launch, device: None)
        self._patched.setattr(f"{LOADER}.script_run.await_complete", lambda job, check: None)
        self._patched.setattr(f"{LOADER}.script_run.release_memory", lambda device: None)
        super().__init__(job, batches, settings, ranks=ranks, parts=ranks)

    def embeddings(self) -> rowcast.EmbeddingBagCollection:
        sparse, capacity = self.job.optimizer.sparse, self.job.cache.capacity
        return rowcast.EmbeddingBagCollection(self._configs, optimizer=sparse, capacity=capacity, job=self._sections)

    def make_pair(
        self, number: int, batches: Sequence[ScheduledBatch], settings: Settings, past: Past | None, sharing: Sharing
    ) -> ScriptPair:
        self.scripts.append(self._kind(self, self.job, batches, settings, past, sharing))
        return self.scripts[-1]

    def run(self) -> Self:
        self._advance_until_all("script")
        self._advance_until_all("prefetcher")
        addends = zip(*(pair.own_losses for pair in self.scripts), strict=True)
        losses = [np.float32(sum_in_order(torch.stack(own))) for own in addends]
        for pair in self.pairs:
            pair.results.losses = losses
            check_planner(pair.prefetcher.planner)
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for pair in self.scripts:
            pair.script.leave()
            pair.loader.close()
        gc.collect()  # a run is a web of closures over megabytes
        self._patched.undo()
