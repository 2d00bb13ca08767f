"""Defines the job file: one TOML file, read by both processes and checked here.

Every section is a frozen struct. An unknown key, a wrong type or an impossible value raises a `ConfigError` of one
sentence. Sections with kinds are beside their registry: `formats.py`, `models.py`, `optimizers.py`, `stores.py`.
The comments above and beside the keys become docs/job-file.md (`benchmarks/job_page.py`).
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import xxhash
from msgspec import Meta

from rowcast.job.embedding_tables import Table, TablesFrom
from rowcast.job.formats import Data
from rowcast.job.models import ModelSettings
from rowcast.job.optimizers import Beta, Clip, LearningRateSchedule, Rate, SparseOptimizer, check_learning_rate
from rowcast.job.section import Section, defaults_of_other_kinds
from rowcast.job.stores import Store
from rowcast.job.units import Size, parse_bytes, parse_rows, parse_seconds

MIN_RING_BYTES = 2**20
AUTO_MIRROR_BYTES = 64 * 2**20
MAX_TABLES = 2**15
TABLES = "tables"  # the folder of `Job.table_folder` in a run directory


# those of cache.policy: a new one is a line here and its class
POLICIES = "rowcast.prefetcher.planner.eviction"


@dataclass(frozen=True, slots=True)
class PolicyKind:
    factory: str  # "module:class", called with the first batches as `new_policy` is; imported when the policy is used
    note: str = ""  # for docs/job-file.md
    looks_ahead: bool = False  # sees the batches of lookahead.horizon; otherwise only the past, as if it were 0


EVICTION_POLICIES = {
    "lookahead": PolicyKind(f"{POLICIES}:FarthestNextUse", note="farthest next use first", looks_ahead=True),
    "lru": PolicyKind(f"{POLICIES}:FarthestNextUse", note="oldest last use first"),
    "lfu": PolicyKind(f"{POLICIES}:UseCounts", note="fewest batches since the fill first"),
    "static": PolicyKind(f"{POLICIES}:StaticCounts", note="fewest of the run's first batches first"),
}

Policy = Annotated[str, Meta(extra={"one_of": EVICTION_POLICIES})]
Horizon = Annotated[int, Meta(ge=0, le=2**20)] | Literal["auto"]  # batches of ids known ahead
Bundle = Annotated[int, Meta(ge=1, le=64)] | Literal["auto"]  # steps of a plan
Threads = Annotated[int, Meta(ge=1, le=2**12)] | Literal["auto"]
NotNegative = Annotated[float, Meta(ge=0)]


class JobSection(Section, frozen=True, kw_only=True):
    name: str = "rowcast"  # only used as a label of the metric `rowcast_build_info`
    # seeds every random number: first values of rows, dense weights, shuffles
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    # the folder that receives `report.json`, `report.html`, `losses.f32` and `checkpoints/step-<n>` (n counts
    # evaluation steps too); only one run at a time can use it
    run_dir: str

    def check(self) -> None:
        if not self.run_dir:
            raise ValueError("run_dir is empty; name a folder")


class DenseOptimizer(Section, frozen=True, kw_only=True):
    """Trains the model's weights, as in torch.optim. A model with [its own step](models.md#your-own-step) has none."""

    kind: Literal["sgd", "adagrad", "adam", "adamw"]
    lr: Rate  # the learning rate
    eps: NotNegative | None = None  # by default that of torch.optim
    betas: tuple[Beta, Beta] = (0.9, 0.999)  # for adam and adamw
    initial_accumulator: NotNegative = 0.0  # for adagrad
    momentum: NotNegative = 0.0  # for sgd
    # `adamw` multiplies each weight by 1 - lr * weight_decay; the other kinds add weight_decay times the weight to its
    # gradient, so that `adam` scales the decay as it scales gradients
    weight_decay: NotNegative = 0.0
    clip_value: Clip | None = None  # the largest absolute value of a gradient's element; larger ones are clipped to it
    # the largest 2-norm of all these gradients together, after `clip_value`; longer gradients are scaled down to it
    clip_norm: Clip | None = None
    schedule: LearningRateSchedule = LearningRateSchedule()

    def check(self) -> None:
        check_learning_rate(self)
        if self.momentum and self.kind != "sgd":
            raise ValueError(f'momentum belongs to kind = "sgd", not {self.kind!r}')


class Optimizer(Section, frozen=True, kw_only=True):
    sparse: SparseOptimizer
    dense: DenseOptimizer | None = None
    clip_norm: float | None = None  # refused: use `sparse.clip_rows` and `dense.clip_norm`

    def check(self) -> None:
        if self.clip_norm is not None:
            raise ValueError(
                "clip_norm over rows and dense weights together is refused: it needs the gradient of every row before "
                "any row is updated, and rows are updated in the backward pass; use dense.clip_norm and "
                "sparse.clip_rows"
            )


MAX_RANK = 1024  # an evaluation counts each rank below it


class Eval(Section, frozen=True, kw_only=True):
    # train steps between evaluations; every epoch ends with one in any case, and with 0 there are no others
    every: Annotated[int, Meta(ge=0)] = 0
    # training ends once this many evaluations in a row have had no lower loss than the best one before them; with 0 it
    # does not; see [recovery.md](recovery.md#training-ends-early)
    patience: Annotated[int, Meta(ge=0)] = 0
    # `best`: each evaluation has a checkpoint, and that of the lowest loss stays on disk; scores, exports, versions and
    # `--eval` are of it. A run continues from the newest
    keep: Literal["newest", "best"] = "newest"
    # `file`: each file of `data.path` is evaluated before it is trained, and nothing else is; see
    # [data.md](data.md#each-file-is-evaluated-before-it-is-trained)
    next: Literal["none", "file"] = "none"
    # the k of HR@k, NDCG@k and MRR@k that are shown if the model ranks its positives, see
    # [models.md](models.md#ranks-of-positives)
    ranks: list[Annotated[int, Meta(ge=1, le=MAX_RANK)]] = msgspec.field(default_factory=lambda: [1, 10, 50])


class Cache(Section, frozen=True, kw_only=True):
    # device bytes for the rows of all groups, or `"20000 rows"` if all tables have the same width and dtype; staging
    # takes extra memory: the rows of two typical plans in each direction, at least 1 MiB in total
    capacity: Size
    # which rows leave the device: {kinds}; the others exist for comparison and train to the same bits
    policy: Policy = "lookahead"
    # maps a group to its exact capacity, such as `fp32_d16_sgd = "16MiB"` or `"20000 rows"`; the other groups divide
    # the rest
    groups: dict[str, Size] = {}

    def check(self) -> None:
        for capacity in (self.capacity, *self.groups.values()):
            if parse_rows(capacity) is None:
                parse_bytes(capacity)

    @property
    def capacity_rows(self) -> int | None:
        return parse_rows(self.capacity)


def plans_ahead(depth: int) -> int:
    """Returns how many plans may be made beyond the last completed one."""
    return 2 * depth + 2


class Lookahead(Section, frozen=True, kw_only=True):
    depth: Annotated[int, Meta(ge=1, le=64)] = 4  # plans that may have their rows in flight
    # the most steps that one plan serves: rows move once for all of them; with `"auto"` a plan serves as many steps as
    # give it 2,048 samples, but at most 8; with `data.follow` it is 1
    bundle: Bundle = "auto"
    # batches of ids known ahead; `"auto"` grows while more ids would change the fetched rows; with `data.follow` it is
    # 2 * `depth` + 2
    horizon: Horizon = "auto"
    id_bytes: Size = "256MiB"  # the most host memory for ids known ahead with `horizon = "auto"`

    def check(self) -> None:
        parse_bytes(self.id_bytes)

    @property
    def horizon_batches(self) -> int:
        """Batches of ids known beyond the one being planned, at least `depth`; "auto" starts at `depth`."""
        return self.depth if self.horizon == "auto" else max(self.horizon, self.depth)

    def of_arriving_data(self) -> "Lookahead":
        """Returns it with the least that may wait where it says "auto": a batch is trained once those of its horizon
        are known."""
        horizon = plans_ahead(self.depth) if self.horizon == "auto" else self.horizon
        return msgspec.structs.replace(self, horizon=horizon, bundle=1 if self.bundle == "auto" else self.bundle)

    @property
    def known_ahead(self) -> Horizon:
        return "auto" if self.horizon == "auto" else self.horizon_batches


CheckpointInterval = int | Literal["epoch"]  # train steps between checkpoints; 0 for none


class Checkpoint(Section, frozen=True, kw_only=True):
    # the interval between checkpoints: a number of train steps, `"epoch"`, or a time such as `"10m"`; the end of the
    # run and a requested stop always make one; with 0 there are no others
    every: Annotated[int, Meta(ge=0)] | str = "10m"
    keep: Annotated[int, Meta(ge=1)] = 2  # how many checkpoints stay on disk
    # host memory for rows that training overwrites before a checkpoint in progress has written them; when it is full,
    # training waits for the disk
    memory: Size = "256MiB"

    def check(self) -> None:
        parse_bytes(self.memory)
        if self.every_seconds is not None and not 1 <= self.every_seconds < float("inf"):
            raise ValueError(f'every = {self.every!r} must be at least "1s"')

    @property
    def every_seconds(self) -> float | None:
        """The interval if it is a time, else None. Raises ValueError with a sentence."""
        if isinstance(self.every, int) or self.every == "epoch":
            return None
        try:
            return parse_seconds(self.every)
        except ValueError:
            raise ValueError(
                f'every = {self.every!r} must be a number of train steps, a time such as "10m", or "epoch"'
            ) from None

    @property
    def interval(self) -> CheckpointInterval:
        """The interval that plans follow; 0 if it is a time, which the clock of a run decides."""
        return "epoch" if self.every == "epoch" else self.every if isinstance(self.every, int) else 0

    @property
    def described(self) -> str:
        if self.every == 0:
            return "at the end only"
        if self.every == "epoch":
            return "after each epoch"
        return f"every {self.every}" if isinstance(self.every, str) else f"every {self.every} train steps"


LEAST_SILENCE_S = 2.0


class Transport(Section, frozen=True, kw_only=True):
    # `ipc` for two processes on one host, or `tcp://host:port`, which the prefetcher binds and the trainer connects to
    endpoint: str = "ipc"
    keys: str | None = None  # tcp: the folder of CURVE keys made by `prefetcher keys --out` (SECURITY.md)
    # host bytes of each of the two rings; `"auto"` is `lookahead.depth` + 1 typical plans, at least 2 MiB, and 64 MiB
    # over tcp
    ring: Size = "auto"
    # how long each process waits for the other to connect; it counts while the other is not seen to start on this host
    connect_timeout: str | float = "60s"
    stall_timeout: str | float = "300s"  # how long both processes may be without progress before they give up
    # how long a peer may be silent before a process gives up; a peer that is seen to run on this host has until
    # `stall_timeout`
    silence_timeout: str | float = "7s"
    # how long a process waits for a new peer after a loss, to continue from the checkpoint; 0 ends the process at once
    rejoin_timeout: str | float = "0s"

    def check(self) -> None:
        if self.endpoint != "ipc" and not is_tcp_address(self.endpoint):
            raise ValueError(f'endpoint = {self.endpoint!r} must be "ipc" or "tcp://host:port"')
        if self.is_tcp and not self.keys:
            raise ValueError(
                f'endpoint = {self.endpoint!r} needs keys = "FOLDER", even on one host: nothing travels unencrypted; '
                "`prefetcher keys --out FOLDER` makes them"
            )
        if self.ring != "auto" and parse_bytes(self.ring) < MIN_RING_BYTES:
            raise ValueError(f"ring = {self.ring!r} must be at least 1MiB")
        for name in ("connect_timeout", "stall_timeout"):
            if not parse_seconds(getattr(self, name)) > 0:
                raise ValueError(f"{name} = {getattr(self, name)!r} must be more than 0 seconds")
        if not parse_seconds(self.silence_timeout) >= LEAST_SILENCE_S:
            raise ValueError(
                f"silence_timeout = {self.silence_timeout!r} must be at least {LEAST_SILENCE_S:g} seconds: a peer that "
                "has nothing else to say sends a heartbeat every second"
            )
        if not parse_seconds(self.rejoin_timeout) >= 0:
            raise ValueError(f"rejoin_timeout = {self.rejoin_timeout!r} must be 0 seconds or more")

    @property
    def is_tcp(self) -> bool:
        return self.endpoint != "ipc"

    @property
    def ring_bytes(self) -> int | None:
        return None if self.ring == "auto" else parse_bytes(self.ring)

    @property
    def mirror_bytes(self) -> int:
        """Bytes of each ring over tcp. Only the job file decides them, so a peer cannot make this process allocate."""
        return self.ring_bytes or AUTO_MIRROR_BYTES


def is_tcp_address(endpoint: str) -> bool:
    match = re.fullmatch(r"tcp://(?:[^\s:/\[\]]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5})", endpoint)
    return match is not None and 1 <= int(match[1]) < 2**16


class Ranks(Section, frozen=True, kw_only=True):
    """Trainers that divide every batch, each with its prefetcher: see [ranks.md](ranks.md)."""

    count: Annotated[int, Meta(ge=1, le=1024)] = 1  # trainers; torchrun's world size must be this
    # the slices of a batch whose gradients are added, `count` by default; they decide the bits, `count` does not; each
    # rank needs 1, 2, 4, 8, ... of them
    parts: Annotated[int, Meta(ge=1, le=2**12)] | None = None
    # the most host memory that the rows of a rank may take once all are trained, for tables with
    # `placement = "auto"`: they are placed within it; by default it is not counted. The index, at most 13 bytes a row,
    # comes on top. Not with a memory tier, where `store.memory` is the limit
    memory: Size | None = None
    # ranks of a host, `count` by default: torchrun's `--nproc-per-node`
    per_host: Annotated[int, Meta(ge=1)] | None = None
    timeout: str | float = "60s"  # how long a rank waits for the others before it gives up
    # `bf16` rounds the gradient of each row in a part and every sum of them, and pooled vectors with their gradients,
    # also with one rank or one part: these travel with half the bytes; see [ranks.md](ranks.md#fewer-bytes)
    gradients: Literal["fp32", "bf16"] = "fp32"

    def check(self) -> None:
        check_shared(self.num_parts, self.count)
        if self.per_host is not None and self.count % self.per_host:
            raise ValueError(f"per_host = {self.per_host} must divide count = {self.count}")
        if not parse_seconds(self.timeout) > 0:
            raise ValueError(f"timeout = {self.timeout!r} must be more than 0 seconds")
        if self.memory is not None:
            parse_bytes(self.memory)

    @property
    def num_parts(self) -> int:
        return self.count if self.parts is None else self.parts

    @property
    def on_host(self) -> int:
        """Ranks of a host."""
        return self.count if self.per_host is None else self.per_host


def check_shared(parts: int, ranks: int) -> None:
    """Raises ValueError unless the parts of each rank are a branch of the tree over all parts."""
    own = parts // ranks
    if parts % ranks or not own or (ranks > 1 and own & (own - 1)):
        raise ValueError(
            f"{parts} parts cannot be shared by {ranks} ranks: each needs 1, 2, 4, 8, ... parts, so that "
            f"its sum is a branch of the tree over all parts; {ranks} parts are the least"
        )


class Trainer(Section, frozen=True, kw_only=True):
    device: str = "auto"  # `auto`, `cpu`, `cuda` or `cuda:<n>`
    # threads of torch, which decide bits: a restart uses the number that its checkpoint records; at a first start,
    # `auto` is 1 if `ranks.parts` is above 1, otherwise one per core that the process may use, within the quota of a
    # container
    threads: Threads = "auto"
    # `auto` uses Triton's kernels on CUDA and compiled loops on a CPU if they pass a check at the start; `torch` uses
    # plain torch operations, which are slower
    kernels: Literal["auto", "torch"] = "auto"


class Prefetcher(Section, frozen=True, kw_only=True):
    # decoding processes; their number does not change the results; npy and Parquet have one more for dense
    # features and labels, and a `package.module:factory` has only one
    workers: Annotated[int, Meta(ge=1, le=64)] = 1
    # threads of the planner, and of reads and writes of rows in memory; `auto` is a quarter of the
    # cores, or half of them, at most 8, if the trainer computes on a device
    threads: Threads = "auto"
    # runs the prefetcher only on otherwise idle cores (Linux: SCHED_IDLE): for a trainer on the CPU of an otherwise
    # idle machine; the kernel divides cores between terminals first, so start both processes from one (`rowcast
    # train`)
    background: bool = False


class Metrics(Section, frozen=True, kw_only=True):
    # where it serves /metrics, /healthz and /readyz: `host:port`, `[address]:port` for IPv6; a `+` after it allows
    # any free port if that one is in use; port 0 takes any free port
    prefetcher: str = "127.0.0.1:9400+"
    trainer: str = "127.0.0.1:9401+"  # the same for the trainer
    certfile: str | None = None  # a PEM certificate; with it both processes serve https instead of http
    keyfile: str | None = None  # the PEM key of `certfile`

    def check(self) -> None:
        if (self.certfile is None) != (self.keyfile is None):
            raise ValueError("certfile and keyfile belong together; give both for https, or neither")
        for name in ("prefetcher", "trainer"):
            if not re.fullmatch(r"(?:[^:\s\[\]]+|\[[0-9A-Fa-f:.]+\]):\d{1,5}\+?", getattr(self, name)):
                raise ValueError(f'{name} = {getattr(self, name)!r} must be "host:port"')


CRITEO_KAGGLE_CARDINALITIES = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip


MOST_BUNDLED, BUNDLED_SAMPLES = 8, 2048  # steps of a plan, and samples, with `bundle = "auto"`


class Job(Section, frozen=True, kw_only=True):
    """A complete, checked job file. `tables` is always filled, from `[[tables]]` or from `[tables_from]`."""

    job: JobSection
    data: Data
    tables: list[Table] = []
    tables_from: TablesFrom | None = None
    model: ModelSettings
    optimizer: Optimizer
    eval: Eval = Eval()
    cache: Cache
    lookahead: Lookahead = Lookahead()
    store: Store = Store()
    checkpoint: Checkpoint = Checkpoint()
    transport: Transport = Transport()
    ranks: Ranks = Ranks()
    trainer: Trainer = Trainer()
    prefetcher: Prefetcher = Prefetcher()
    metrics: Metrics = Metrics()

    @property
    def run_dir(self) -> Path:
        return Path(self.job.run_dir)

    @property
    def bundle(self) -> int:
        """The most steps that one plan serves."""
        if not EVICTION_POLICIES[self.cache.policy].looks_ahead:
            return 1
        own, samples = self.lookahead, self.data.batch_size
        known = MOST_BUNDLED if own.horizon == "auto" else own.horizon_batches
        return min(MOST_BUNDLED, -(-BUNDLED_SAMPLES // samples), known) if own.bundle == "auto" else own.bundle

    @property
    def table_folder(self) -> Path:
        """The folder for a store that keeps its rows in files."""
        path: str | None = getattr(self.store, "path", None)  # of the stores that have this key
        return self.run_dir / TABLES if path is None else Path(path)

    def first_threads(self, cores: int) -> int:
        """Threads of torch at a first start with this number of usable cores. With parts, `auto` does not depend on the
        host: their bits are those of any number of ranks."""
        auto = cores if self.ranks.num_parts == 1 else 1
        return auto if self.trainer.threads == "auto" else self.trainer.threads

    @property
    def features(self) -> list[str]:
        """Feature names in the order of every array: tables from top to bottom, their features from left to right."""
        return [feature for table in self.tables for feature in table.features]

    def content(self) -> dict[str, Any]:
        """Every key, for manifests and digests. Keys of other models and stores have their defaults."""
        content: dict[str, Any] = msgspec.to_builtins(self)
        for name, section in (("model", self.model), ("store", self.store)):
            content[name] |= defaults_of_other_kinds(section)
        # left out of manifests and digests by the versions that had no such keys
        data = content["data"]
        keys = [(data, key) for key in ("of", "negatives", "by_name", "follow")] + [(data["columns"], "inputs")]
        for section_content, key in keys:
            if not section_content[key]:
                del section_content[key]
        return content

    def session_digest(self) -> str:
        """The digest that the two processes compare: without ports, threads, and settings that may differ between
        hosts, or that the prefetcher decides."""
        content = self.content()
        for table in content["tables"]:
            table.pop("placement")
        content["data"]["columns"].pop("value_rule")
        content.pop("metrics")
        content["trainer"].pop("threads")
        for key in ("threads", "background"):
            content["prefetcher"].pop(key)
        for section, key in (("transport", "endpoint"), ("transport", "keys")):
            content[section].pop(key)
        content["store"] = {"kind": self.store.kind}
        return digest(content)


def digest(content: object) -> str:
    """32 hex digits over the canonical JSON of builtins."""
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
