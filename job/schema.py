"""The job file: one TOML file, read by both processes, checked once here.

Every section is a frozen struct. An unknown key, a wrong type or an impossible value raises a `ConfigError` of one
sentence. The comments above and beside the keys become docs/job-file.md (`job/page.py`).
"""

import json
import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import xxhash

from rowcast.job.eviction_policies import EVICTION_POLICIES
from rowcast.job.formats import CUSTOM, FORMATS, Format, format_of, formats_with
from rowcast.job.models import BUILT_IN_MODELS, ONE
from rowcast.job.row_optimizers import ROW_OPTIMIZERS
from rowcast.job.server_url import parse_server_url
from rowcast.job.stores import STORES

UNITS = {
    "": 1,
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
MIN_RING_BYTES = 2**20
AUTO_MIRROR_BYTES = 64 * 2**20
MAX_ROWS_PER_TABLE = 2**48  # a key is table_index << 48 | row
MAX_TABLES = 2**15
MAX_LABELS = 64  # a sample; an evaluation counts 4 MiB for each
MAX_MLP_WIDTH = 2**20
MLPS = ("bottom_mlp", "top_mlp", "attention_mlp", "final_mlp", "user_mlp", "item_mlp")
MAX_THREADS = 2**12
MAX_WORKERS = 64
MAX_RANKS = 1024
MAX_PARTS = 2**12
MAX_STEPS = 2**53  # in a schedule: floats count exactly up to here

Size = Annotated[str | int, msgspec.Meta(examples=["64MiB"])]
OptionalSize = Annotated[str | int | None, msgspec.Meta(examples=["8GiB"])]
RowOptimizerKind = Annotated[str, msgspec.Meta(extra={"one_of": ROW_OPTIMIZERS})]
Policy = Annotated[str, msgspec.Meta(extra={"one_of": EVICTION_POLICIES})]
StoreName = Annotated[str, msgspec.Meta(extra={"one_of": STORES})]
Horizon = int | Literal["auto"]  # batches of ids known ahead
RowType = Literal["fp32", "fp16", "bf16"]
# the largest finite values
LARGEST: dict[RowType, float] = {"fp32": (2 - 2**-23) * 2.0**127, "fp16": 65504.0, "bf16": (2 - 2**-7) * 2.0**127}
LARGEST_NORMAL = math.sqrt(64 * math.log(2))  # the largest value of `init = "normal:std"`, in standard deviations


def parse_bytes(text: str | int) -> int:
    """`"64MiB"` -> bytes. Raises ValueError with a sentence."""
    if isinstance(text, int):
        value = text
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
        if match is None or match[2] not in UNITS:
            raise ValueError(
                f'{text!r} is not a size; write bytes with a unit, such as "64MiB" '
                '(cache.capacity also takes "20000 rows")'
            )
        value = int(min(float(match[1]) * UNITS[match[2]], 2**63))
    if not 0 < value < 2**63:
        raise ValueError(f"{text!r} must be more than 0 and less than 2**63 bytes")
    return value


def parse_rows(text: str | int) -> int | None:
    """`"20000 rows"` -> rows; None for anything else."""
    match = re.fullmatch(r"\s*(\d+)\s+rows\s*", str(text))
    return int(match[1]) if match else None


def parse_seconds(text: str | float) -> float:
    """`"60s"`, `"500ms"`, `"5m"`, `"1h"` or a number of seconds -> seconds. Raises ValueError with a sentence."""
    if not isinstance(text, str):
        return float(text)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h)\s*", text)
    if match is None:
        raise ValueError(f'{text!r} is not a duration; write a number and ms, s, m or h, such as "60s"')
    return float(match[1]) * {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}[match[2]]


def is_factory(name: str) -> bool:
    return re.fullmatch(r"[^:\s]+:[^:\s]+", name) is not None


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class JobSection(Section, frozen=True, kw_only=True):
    name: str = "rowcast"  # only used as a label of the metric `rowcast_build_info`
    seed: int = 0  # seeds every random number: first values of rows, dense weights, shuffles
    # the folder that receives `report.json`, `report.html`, `losses.f32`, `checkpoints/step-<n>` (n counts evaluation
    # steps too), `lines` (line counts of text files, which save the next start from counting again) and `order` (which
    # samples are hot, for `data.order`); only one run at a time can use it
    run_dir: str

    def __post_init__(self) -> None:
        if not self.run_dir:
            raise ValueError("run_dir is empty; name a folder")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed = {self.seed} must be from 0 to 2**63 - 1")


class Columns(Section, frozen=True, kw_only=True):
    """The columns of Parquet and CSV files: see [data.md](data.md). A feature is the column of the same name."""

    label: str = "label"  # the column that holds the label
    # several labels a sample instead of `label`, for a model with a logit for each of them (see
    # [models.md](models.md#several-labels)): their columns, or their names in formats without column names; a missing
    # one (null, an empty cell, NaN) is unknown
    labels: list[str] = []
    # `binary`: labels are 0 or 1; `real`: any finite numbers, for a model with a `loss` of its own
    label_values: Literal["binary", "real"] = "binary"
    # the columns that hold dense features; by default all columns named `int_<n>`, in order of n; `[]` means none
    dense: list[str] | None = None
    weights: dict[str, str] = {}  # maps a feature to the column that holds a weight for each of its look-ups
    # `true`, or a list of features: their ids (strings, or integers of any size) are hashed into their tables; row 0
    # is reserved for a missing id
    hash: bool | list[str] = False
    # CSV: maps a feature to the separator between the ids in a cell (and between their weights), such as `";"`
    lists: dict[str, str] = {}
    delimiter: str = ","  # CSV: the separator between cells

    def __post_init__(self) -> None:
        if len(self.delimiter) != 1 or not self.delimiter.isascii() or self.delimiter in '"\r\n':
            raise ValueError(
                f"delimiter = {self.delimiter!r} must be one ASCII character and neither a quote nor a line break"
            )
        for feature, separator in self.lists.items():
            if not separator:
                raise ValueError(f'lists.{feature} is empty; give the separator between the ids of a cell, such as "|"')
        if len(self.labels) == 1:
            raise ValueError(f'labels names one column; write label = "{self.labels[0]}"')
        if self.labels and self.label != "label":
            raise ValueError(f'give either label = "{self.label}" or labels, not both')
        if len(self.labels) > MAX_LABELS:
            raise ValueError(f"labels names {len(self.labels)} columns, more than {MAX_LABELS}")
        for name in self.labels:
            if self.labels.count(name) > 1:
                raise ValueError(f"labels names {name} twice")

    @property
    def label_names(self) -> list[str]:
        return self.labels or [self.label]

    @property
    def label_shape(self) -> tuple[int, ...]:
        """The shape of a sample's labels: () for one, (T,) for several."""
        return (len(self.labels),) if self.labels else ()

    def is_hashed(self, feature: str) -> bool:
        return self.hash if isinstance(self.hash, bool) else feature in self.hash


class Synthetic(Section, frozen=True, kw_only=True):
    samples: int = 1_000_000  # samples in an epoch
    preset: Literal["criteo-kaggle"] | None = None  # provides `tables_from.cardinalities` when they are not given
    scale: float = 1.0  # multiplies the preset's cardinalities; every table keeps at least 1 row
    zipf: float = 1.05  # the skew of the ids: the exponent of their Zipf distribution; 0 makes all ids equally frequent

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"samples = {self.samples} must be at least 1")
        if not 0 < self.scale <= 1e6:
            raise ValueError(f"scale = {self.scale} must be above 0")
        if not 0 <= self.zipf <= 10:
            raise ValueError(f"zipf = {self.zipf} must be from 0 to 10")


class Data(Section, frozen=True, kw_only=True):
    # {FORMATS}, or `package.module:factory`
    format: str
    path: str | None = None  # a file, a folder or a glob; files are read in order of their names
    eval_path: str | None = None  # separate evaluation data, used instead of `eval_fraction`
    batch_size: int = 2048  # samples in a batch; the last batch of an epoch may be shorter and is trained too
    epochs: int = 1  # passes over the training data
    eval_fraction: float = 0.0  # the share of the data, taken from its end before any shuffle, that is used to evaluate
    # `none`, `window:65536` (within blocks of 65536 rows) or `full` (not for TSV, CSV and Parquet); the order depends
    # on the seed and the epoch
    shuffle: str = "none"
    # `hot-blocks:20`: samples whose ids are all in `hot` and samples with others take turns, in 20 blocks of each an
    # epoch (criteo-npy and synthetic); both kinds stay in the order of `shuffle`, see [orders.md](orders.md)
    order: str | None = None
    # `order`: a file of hot rows, which `prefetcher profile --out` writes; `cache.pin` may name it too, or another
    hot: str | None = None
    # what happens to an id that is outside its table or missing (null in Parquet, an empty cell in CSV): `error` stops
    # the run and names file, line, column and id; `zero` uses row 0; `modulo` uses the remainder, and row 0 for a
    # missing id; `zero` and `modulo` count such ids. A missing hash in Criteo TSV is always row 0
    on_invalid_id: Literal["error", "modulo", "zero"] = "error"
    hash: bool = False  # criteo-npy: reads int32 ids as unsigned and takes them modulo the table's rows
    columns: Columns = Columns()
    synthetic: Synthetic = Synthetic()
    options: dict[str, Any] = {}  # passed to the `package.module:factory`

    def __post_init__(self) -> None:
        known = format_of(self.format)
        if known is CUSTOM and not is_factory(self.format):
            raise ValueError(f'format = {self.format!r} is not one of {", ".join(FORMATS)}, "package.module:factory"')
        if self.path is None and known.has_files:
            raise ValueError(f'format = {self.format!r} needs path = "..."')
        for name in ("batch_size", "epochs"):
            if not 1 <= getattr(self, name) < 2**31:
                raise ValueError(f"{name} = {getattr(self, name)} must be from 1 to 2**31 - 1")
        if not 0 <= self.eval_fraction < 1:
            raise ValueError(f"eval_fraction = {self.eval_fraction} must be at least 0 and less than 1")
        if not re.fullmatch(r"none|full|window:[1-9]\d*", self.shuffle):
            raise ValueError(f"shuffle = {self.shuffle!r} is not one of none, full, window:ROWS")
        if self.shuffle == "full" and not known.random_access:
            raise ValueError(
                f'shuffle = "full" needs random access, which {self.format} does not have; use "window:65536"'
            )
        self._check_order(known)
        if self.columns.hash and not known.named_columns:
            belongs = f"belongs to format = {formats_with('named_columns')}"
            raise ValueError(f"columns.hash {belongs}, not {self.format!r}; remove it")
        if (self.columns.lists or self.columns.delimiter != ",") and not known.text_cells:
            belongs = f"belong to format = {formats_with('text_cells')}"
            raise ValueError(f"columns.lists and columns.delimiter {belongs}, not {self.format!r}; remove them")
        if (self.columns.labels or self.columns.label_values != "binary") and known.one_label:
            raise ValueError(
                f"columns.labels and columns.label_values: {self.format} has one label of 0 or 1 a sample; remove them"
            )

    def _check_order(self, known: Format) -> None:
        if self.order is None and self.hot is not None:
            raise ValueError('hot belongs to order = "hot-blocks:N"; set that, or remove hot')
        if self.order is None:
            return
        if self.order == "hot-blocks:auto":
            raise ValueError(
                'order = "hot-blocks:auto" is refused: blocks that follow the test loss would make plans depend on '
                'results, so no look-ahead could cross a block; give a number of blocks, such as "hot-blocks:20"'
            )
        if not re.fullmatch(r"hot-blocks:[1-9]\d{0,5}", self.order):
            raise ValueError(f"order = {self.order!r} is not hot-blocks:N, with N from 1 to 999999")
        if known is CUSTOM:
            raise ValueError(f"order = {self.order!r}: {self.format} decides the order of its samples; remove it")
        if not known.random_access:
            raise ValueError(
                f"order = {self.order!r} needs random access, which {self.format} does not have; "
                f"use {formats_with('random_access')}"
            )
        if self.hot is None:
            raise ValueError(
                f'order = {self.order!r} needs hot = "...", the hot rows; `prefetcher profile --out` writes them'
            )

    @property
    def num_hot_blocks(self) -> int | None:
        """Blocks of hot samples in an epoch, and as many of others; None without them."""
        return None if self.order is None else int(self.order.removeprefix("hot-blocks:"))

    @property
    def whole_order(self) -> str:
        """Both keys in one: `full`, or `full+hot-blocks:20`."""
        return self.shuffle if self.order is None else f"{self.shuffle}+{self.order}"

    @property
    def shuffle_window(self) -> int | None:
        """Rows in a shuffled block; 0 for the whole data set; None without a shuffle."""
        if self.shuffle == "none":
            return None
        return 0 if self.shuffle == "full" else int(self.shuffle.removeprefix("window:"))


class Table(Section, frozen=True, kw_only=True):
    name: str
    num_embeddings: int  # rows
    embedding_dim: int
    features: list[str]  # the features that look up this table; there may be several
    # the dtype of the weights that a look-up reads; `fp16` and `bf16` take half the bytes and round every update to the
    # nearest value, ties to even; arithmetic and optimizer state stay in fp32
    dtype: Literal["fp32", "fp16", "bf16"] = "fp32"
    # how the rows of a bag are combined; `none` keeps them apart, as a sequence
    pooling: Literal["sum", "mean", "none"] = "sum"
    # the rows' first values: `uniform` (within +-1/sqrt(num_embeddings)), `uniform:lo,hi`, `normal:std` or `constant:x`
    init: str = "uniform"
    # every row has one more weight, its linear weight, which begins as 0: models get f32 [B, 1] beside f32
    # [B, embedding_dim] from one look-up, as Wide & Deep and DeepFM need it; not with `rowwise_adagrad` or `clip_rows`,
    # which see a row as a whole
    linear: bool = False

    @property
    def width(self) -> int:
        """Weights in a row: `embedding_dim`, and the linear one."""
        return self.embedding_dim + self.linear

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", self.name):
            raise ValueError(f"table name {self.name!r} must be letters, digits and underscores")
        if not 1 <= self.num_embeddings <= MAX_ROWS_PER_TABLE:
            raise ValueError(f"table {self.name}: num_embeddings = {self.num_embeddings} must be from 1 to 2**48")
        if not 1 <= self.embedding_dim <= 4096:
            raise ValueError(f"table {self.name}: embedding_dim = {self.embedding_dim} must be from 1 to 4096")
        if not self.features:
            raise ValueError(f"table {self.name} has no feature; list at least one in features = [...]")
        if self.linear and self.pooling == "none":
            raise ValueError(
                f'table {self.name}: linear = true needs pooled look-ups, and pooling is "none"; use "sum" or "mean"'
            )
        reach = init_reach(self.init, self.num_embeddings)
        if reach > LARGEST[self.dtype]:
            raise ValueError(
                f"table {self.name}: init = {self.init!r} reaches {reach:.6g}, and {self.dtype} ends at "
                f"{LARGEST[self.dtype]:.6g}; choose smaller first values"
            )


class TablesFrom(Section, frozen=True, kw_only=True):
    """A short form for the usual case: one table `t_cat_<n>` for each feature `cat_<n>`, all of the same width."""

    cardinalities: list[int] | None = None  # the rows of each table; required unless `data.synthetic.preset` is set
    embedding_dim: int
    dtype: Literal["fp32", "fp16", "bf16"] = "fp32"  # as in `[[tables]]`
    pooling: Literal["sum", "mean"] = "sum"
    init: str = "uniform"  # as in `[[tables]]`
    linear: bool = False  # as in `[[tables]]`


class Model(Section, frozen=True, kw_only=True):
    # {BUILT_IN_MODELS}, or `package.module:factory` for any `nn.Module` that takes (dense, list of embeddings), and
    # a list of linear weights if a table has them; if the module has a method `loss(outputs, labels)`, that replaces
    # binary cross entropy
    kind: str = "dlrm"
    # the output widths of its layers, each followed by ReLU; for dlrm and tbsm the last is `embedding_dim`
    bottom_mlp: list[int] = []
    # the output widths of its layers; the last is 1, without ReLU; tbsm: the last is the width of a time step's vector,
    # with ReLU
    top_mlp: list[int] = []
    # tbsm: the time steps used before the last entry of a sequence, which is the target; din: the entries used of a
    # history; older entries are ignored
    history: int = 20
    # tbsm: the hidden widths between the `history` products with the target and the `history` coefficients; din: the
    # hidden widths between target and entry and the entry's coefficient
    attention_mlp: list[int] = []
    # din: the target of each history, both features of one table with `pooling = "none"`, such as
    # `{ bought = "item" }`; several histories are joined entry by entry
    targets: dict[str, str] = {}
    activation: Literal["dice", "prelu"] = "dice"  # din: what follows each hidden layer; `dice` refuses `ranks.parts`
    softmax: bool = False  # din: whether the coefficients of a history add up to 1
    item_features: list[str] = []  # two-tower: the features of the item; all others and dense features are the user's
    user_mlp: list[int] = []  # two-tower: the output widths of its layers; the last is without ReLU
    item_mlp: list[int] = []  # two-tower: the same for the items; the last is that of `user_mlp`
    temperature: float = 0.05  # two-tower: divides the cosine of user and item
    # two-tower: the dense feature, counted from 0, that holds the natural logarithm of how often the sample's item
    # occurs in the data (a count or a share: constants cancel); the in-batch softmax subtracts it, and the user's tower
    # does not see it; without it nothing is subtracted
    log_frequency: int | None = None
    final_mlp: list[int] = []  # tbsm: the output widths of its layers; the last is 1, without ReLU
    cross_layers: int = 3  # dcnv2: the number of layers of the cross network
    cross_rank: int = 512  # dcnv2: the rank of a cross layer: the width between its two matrices
    # the precision of the model's matrix products: `fp32`, `tf32` (CUDA) or `bf16` (torch.autocast); weights,
    # embeddings and loss stay in fp32
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    # runs full train batches through torch.compile, which needs a C++ compiler on the CPU and Triton on CUDA; the
    # results differ in their bits from those without it
    compile: bool = False
    options: dict[str, Any] = {}  # passed to the `package.module:factory`

    def __post_init__(self) -> None:
        if self.kind not in BUILT_IN_MODELS and not is_factory(self.kind):
            known = ", ".join(BUILT_IN_MODELS)
            raise ValueError(f'kind = {self.kind!r} is not one of {known}, "package.module:factory"')
        own = BUILT_IN_MODELS.get(self.kind)
        if own is not None and not all(self._ends_in(name, end) for name, end in own.layers.items()):
            *others, last = (f"{name} = {end}" for name, end in own.layers.items())
            raise ValueError(f"{self.kind} needs {', '.join(others)} and {last}")
        self._check_belonging()
        for name in ("cross_layers", "cross_rank", "history"):
            if not 1 <= getattr(self, name) <= MAX_MLP_WIDTH:
                raise ValueError(f"{name} = {getattr(self, name)} must be from 1 to {MAX_MLP_WIDTH}")
        if not all(1 <= width <= MAX_MLP_WIDTH for name in MLPS for width in getattr(self, name)):
            raise ValueError(f"{', '.join(MLPS[:-1])} and {MLPS[-1]} list widths, each from 1 to {MAX_MLP_WIDTH}")
        if self.kind == "two-tower" and self.user_mlp[-1] != self.item_mlp[-1]:
            raise ValueError(
                f"user_mlp ends in {self.user_mlp[-1]} and item_mlp in {self.item_mlp[-1]}; two-tower needs them equal"
            )
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature = {self.temperature} must be finite and above 0")
        if self.log_frequency is not None and self.log_frequency < 0:
            raise ValueError(f"log_frequency = {self.log_frequency} must be the number of a dense feature, from 0")

    def _check_belonging(self) -> None:
        """Raises ValueError for a key that only other built-in models read. Custom ones may have bottom and top MLP."""
        for field in msgspec.structs.fields(self):
            key = field.name
            homes = [kind for kind, model in BUILT_IN_MODELS.items() if key in (*model.layers, *model.keys)]
            default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
            is_free = not homes or (key in ("bottom_mlp", "top_mlp") and self.kind not in BUILT_IN_MODELS)
            if not is_free and self.kind not in homes and getattr(self, key) != default:
                names = " or ".join(f'"{kind}"' for kind in homes)
                raise ValueError(f"{key} belongs to kind = {names}, not {self.kind!r}; remove it")

    def _ends_in(self, name: str, end: str) -> bool:
        """Whether the layer's widths are given and end as they must; the tables' width is checked elsewhere."""
        widths = getattr(self, name)
        return bool(widths) and (end != ONE or widths[-1] == 1)


class LearningRateSchedule(Section, frozen=True, kw_only=True):
    """How the learning rate changes over the run: it rises linearly to `lr`, then falls to `final` as `kind` says."""

    warmup: int = 0  # train steps of the rise: the first uses lr / warmup, the last uses lr
    kind: Literal["constant", "linear", "cosine", "polynomial"] = "constant"  # the shape of the decay; `constant`: none
    decay_start: int | None = None  # train steps before the decay; `warmup` by default
    decay_steps: int | None = None  # train steps that the decay takes
    power: float = 2.0  # polynomial: the exponent of the remaining share of the decay
    final: float = 0.0  # the learning rate after the decay

    def __post_init__(self) -> None:
        if not 0 <= self.warmup < MAX_STEPS:
            raise ValueError(f"warmup = {self.warmup} must be 0 or a number of train steps")
        if self.kind == "constant" and (self.decay_start is not None or self.decay_steps is not None or self.final):
            raise ValueError(
                'decay_start, decay_steps and final belong to a decay; set kind = "linear", "cosine" or "polynomial"'
            )
        if self.kind != "constant" and not 1 <= (self.decay_steps or 0) < MAX_STEPS:
            raise ValueError(
                f'kind = "{self.kind}" needs decay_steps = N, the train steps that the decay takes, at least 1'
            )
        if not self.warmup <= self.decay_begin < MAX_STEPS:
            raise ValueError(
                f"decay_start = {self.decay_start} is within the warm-up of {self.warmup} train steps; start after it"
            )
        if not 0 < self.power < float("inf"):
            raise ValueError(f"power = {self.power} must be finite and above 0")
        if self.kind != "polynomial" and self.power != 2.0:
            raise ValueError(f'power belongs to kind = "polynomial", not {self.kind!r}')

    @property
    def decay_begin(self) -> int:
        return self.warmup if self.decay_start is None else self.decay_start


def check_learning_rate(lr: float, schedule: LearningRateSchedule) -> None:
    if not 0 <= lr < float("inf"):
        raise ValueError(f"lr = {lr} must be finite and at least 0")
    if not 0 <= schedule.final <= lr:
        raise ValueError(f"schedule.final = {schedule.final} must be from 0 to lr = {lr}: a learning rate decays")


def check_clip(name: str, clip: float | None) -> None:
    if clip is not None and not 0 < clip < float("inf"):
        raise ValueError(f"{name} = {clip} must be finite and above 0; omit it to clip nothing")


class SparseOptimizer(Section, frozen=True, kw_only=True):
    """Trains the rows. Momentum and weight decay are refused: they change rows that no batch touches."""

    kind: RowOptimizerKind  # {ROW_OPTIMIZERS}
    lr: float  # the learning rate
    eps: float | None = None  # by default 1e-10 for Adagrad and 1e-8 for Adam
    betas: tuple[float, float] = (0.9, 0.999)  # for adam
    initial_accumulator: float = 0.0  # for adagrad and rowwise_adagrad
    # fp16 and bf16 tables: also keeps fp32 master weights; look-ups read the rounded weights, an update changes the
    # master weights and rounds them again
    master: bool = False
    momentum: float = 0.0  # must be 0
    weight_decay: float = 0.0  # must be 0
    # the largest 2-norm of a row's gradient, summed over the batch; a longer gradient is scaled down to it
    clip_rows: float | None = None
    schedule: LearningRateSchedule = LearningRateSchedule()

    def __post_init__(self) -> None:
        for name in ("momentum", "weight_decay"):
            if getattr(self, name) != 0:
                raise ValueError(
                    f"{name} on rows is refused: it changes rows that no batch touches, which no cache can follow; "
                    "remove it"
                )
        check_learning_rate(self.lr, self.schedule)
        check_clip("clip_rows", self.clip_rows)
        known = ROW_OPTIMIZERS[self.kind]
        if not known.trains_at_zero_lr and self.lr == 0:
            raise ValueError(f'lr = 0 is refused for kind = "{self.kind}"; to freeze rows use kind = "sgd"')
        if known.eps is not None and not self.epsilon > 0:
            raise ValueError(f"eps = {self.eps} must be above 0: with 0, rows that no batch touches would become NaN")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas = {list(self.betas)} must be at least 0 and below 1")
        if not 0 <= self.initial_accumulator < float("inf"):
            raise ValueError(f"initial_accumulator = {self.initial_accumulator} must be at least 0")

    @property
    def epsilon(self) -> float:
        """`eps` or its default; 0 for an optimizer without one."""
        default = ROW_OPTIMIZERS[self.kind].eps
        return self.eps if self.eps is not None else default or 0.0


class DenseOptimizer(Section, frozen=True, kw_only=True):
    """Trains the model's own weights, as in torch.optim."""

    kind: Literal["sgd", "adagrad", "adam"]
    lr: float  # the learning rate
    eps: float | None = None  # by default that of torch.optim
    betas: tuple[float, float] = (0.9, 0.999)  # for adam
    initial_accumulator: float = 0.0  # for adagrad
    momentum: float = 0.0  # for sgd
    weight_decay: float = 0.0
    clip_value: float | None = None  # the largest absolute value of a gradient's element; larger ones are cut to it
    # the largest 2-norm of all these gradients together, after `clip_value`; longer gradients are scaled down to it
    clip_norm: float | None = None
    schedule: LearningRateSchedule = LearningRateSchedule()

    def __post_init__(self) -> None:
        check_learning_rate(self.lr, self.schedule)
        check_clip("clip_value", self.clip_value)
        check_clip("clip_norm", self.clip_norm)
        for name in ("momentum", "weight_decay", "initial_accumulator"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} = {getattr(self, name)} must be finite and at least 0")
        if self.eps is not None and not 0 <= self.eps < float("inf"):
            raise ValueError(f"eps = {self.eps} must be finite and at least 0")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas = {list(self.betas)} must be at least 0 and below 1")
        if self.momentum and self.kind != "sgd":
            raise ValueError(f'momentum belongs to kind = "sgd", not {self.kind!r}')


class Optimizer(Section, frozen=True, kw_only=True):
    sparse: SparseOptimizer
    dense: DenseOptimizer
    clip_norm: float | None = None  # refused: use `sparse.clip_rows` and `dense.clip_norm`

    def __post_init__(self) -> None:
        if self.clip_norm is not None:
            raise ValueError(
                "clip_norm over rows and dense weights together is refused: it needs the gradient of every row before "
                "any row is updated, and rows are updated in the backward pass; use dense.clip_norm and "
                "sparse.clip_rows"
            )


class Eval(Section, frozen=True, kw_only=True):
    every: int = 0  # train steps between evaluations; every epoch ends with one in any case

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ValueError(f"every = {self.every} must be 0 (only after each epoch) or a number of train steps")


class Cache(Section, frozen=True, kw_only=True):
    # device bytes for the rows of all groups, or `"20000 rows"` if all tables have the same width and dtype; staging
    # takes extra memory: the rows of two typical plans in each direction, at least 1 MiB in total
    capacity: Size
    # which rows leave the device: {EVICTION_POLICIES}; the others exist for comparison and train to the same bits
    policy: Policy = "lookahead"
    # a file of rows that never leave the device once they are there; `prefetcher profile --out` writes one
    pin: str | None = None
    # maps a group to its exact share of the capacity, such as `fp32_d16_sgd = "16MiB"` or `"20000 rows"`; the other
    # groups divide the rest
    groups: dict[str, Size] = {}

    def __post_init__(self) -> None:
        for capacity in (self.capacity, *self.groups.values()):
            if parse_rows(capacity) is None:
                parse_bytes(capacity)

    @property
    def capacity_rows(self) -> int | None:
        return parse_rows(self.capacity)


class Lookahead(Section, frozen=True, kw_only=True):
    depth: int = 4  # steps that may have their rows on the way, 1 to 64
    # batches of ids known ahead; `"auto"` grows as long as more ids would change which rows are fetched
    horizon: int | Literal["auto"] = "auto"
    id_bytes: Size = "256MiB"  # host memory that the ids known ahead may take with `horizon = "auto"`

    def __post_init__(self) -> None:
        parse_bytes(self.id_bytes)
        if not 1 <= self.depth <= 64:
            raise ValueError(f"depth = {self.depth} must be from 1 to 64")
        if self.horizon != "auto" and not 0 <= self.horizon <= 2**20:
            raise ValueError(f'horizon = {self.horizon} must be "auto" or from 0 to {2**20} batches')

    @property
    def horizon_batches(self) -> int:
        """Batches of ids known beyond the one being planned, at least `depth`; "auto" starts at `depth`."""
        return self.depth if self.horizon == "auto" else max(self.horizon, self.depth)

    @property
    def known_ahead(self) -> Horizon:
        return "auto" if self.horizon == "auto" else self.horizon_batches


KEYS_OF_STORES = ("memory", "path", "disk", "url", "timeout")  # each belongs to some kinds


class Store(Section, frozen=True, kw_only=True):
    kind: StoreName = "memory"  # where the rows live: {STORES}
    # tiered, redis: all memory of the prefetcher; or, for small trials, `"20000 rows"` of each group, whatever
    # else takes memory
    memory: OptionalSize = None
    # mapped, tiered: the folder of the files, which are scratch space and not a checkpoint; by default
    # `<run_dir>/tables`
    path: str | None = None
    # tiered: the most that the files may take; by default as much as a quarter of the memory can index
    disk: OptionalSize = None
    # redis: the server or one server of the cluster, `redis://host:6379`, with TLS `rediss://host:6379`; `user@` may
    # stand before the host, and the password is ROWCAST_REDIS_PASSWORD in the prefetcher's environment
    url: str | None = None
    timeout: str | None = None  # redis: how long a server may be silent before it counts as lost; `"5s"`

    def __post_init__(self) -> None:
        for key in KEYS_OF_STORES:
            if getattr(self, key) is not None and key not in STORES[self.kind].keys:
                homes = " or ".join(f'"{name}"' for name, own in STORES.items() if key in own.keys)
                raise ValueError(f"{key} belongs to kind = {homes}, not {self.kind!r}")
        if self.path == "":
            raise ValueError("path is empty; name a folder")
        if STORES[self.kind].has_tier and self.memory is None:
            raise ValueError(f'kind = "{self.kind}" needs memory, such as memory = "8GiB"')
        if self.memory is not None and self.memory_rows is None:
            parse_bytes(self.memory)
        if self.disk is not None:
            parse_bytes(self.disk)
        if "url" in STORES[self.kind].keys:
            if self.url is None:
                raise ValueError(f'kind = "{self.kind}" needs url, such as url = "redis://host:6379"')
            parse_server_url(self.url)
        if not 0.01 <= self.timeout_seconds <= 3600:
            raise ValueError(f'timeout = {self.timeout!r} must be from "10ms" to "1h"')

    @property
    def memory_rows(self) -> int | None:
        return None if self.memory is None else parse_rows(self.memory)

    @property
    def timeout_seconds(self) -> float:
        return parse_seconds("5s" if self.timeout is None else self.timeout)


CheckpointInterval = int | Literal["epoch"]  # train steps between checkpoints; 0 for none


class Checkpoint(Section, frozen=True, kw_only=True):
    # the interval between checkpoints: a number of train steps, `"epoch"`, or a time such as `"10m"`, which becomes a
    # number of train steps once the run's pace is known; the end of the run and a requested stop always make one, and
    # 0 makes no others
    every: int | str = "10m"
    keep: int = 2  # how many checkpoints stay on disk
    # host memory for rows that training writes over before a checkpoint in progress has written them; where it is full,
    # training waits for the disk
    memory: Size = "256MiB"

    def __post_init__(self) -> None:
        parse_bytes(self.memory)
        if isinstance(self.every, int) and self.every < 0:
            raise ValueError(f"every = {self.every} must be 0 (only at the end) or a number of train steps")
        if self.every_seconds is not None and not 1 <= self.every_seconds < float("inf"):
            raise ValueError(f'every = {self.every!r} must be at least "1s"')
        if self.keep < 1:
            raise ValueError(f"keep = {self.keep} must be at least 1")

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
        """The interval that plans follow; 0 if it is a time, which becomes train steps during the run."""
        return "epoch" if self.every == "epoch" else self.every if isinstance(self.every, int) else 0

    @property
    def described(self) -> str:
        if self.every == 0:
            return "at the end only"
        if self.every == "epoch":
            return "after each epoch"
        return f"every {self.every}" if isinstance(self.every, str) else f"every {self.every} train steps"


class Transport(Section, frozen=True, kw_only=True):
    # `ipc` for two processes on one host, or `tcp://host:port`, which the prefetcher binds and the trainer connects to
    endpoint: str = "ipc"
    keys: str | None = None  # tcp: the folder of CURVE keys that `prefetcher keys --out` has made (SECURITY.md)
    # host bytes of each of the two rings; `"auto"` is `lookahead.depth` + 1 typical plans, at least 2 MiB, and 64 MiB
    # over tcp
    ring: Size = "auto"
    connect_timeout: str | float = "60s"  # how long each process waits for the other to connect
    stall_timeout: str | float = "300s"  # how long neither process may make progress before both give up
    # how long a process that has lost its peer waits for a new one, to continue with it from the checkpoint; 0 ends the
    # process at once
    rejoin_timeout: str | float = "0s"

    def __post_init__(self) -> None:
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
    """Trainers that share every batch, each with its prefetcher: see [ranks.md](ranks.md)."""

    count: int = 1  # trainers; torchrun's world size must be this
    # the slices of a batch whose gradients are added, `count` by default; they decide the bits, `count` does not; each
    # rank needs 1, 2, 4, 8, ... of them
    parts: int | None = None
    per_host: int | None = None  # ranks of a host, `count` by default: torchrun's `--nproc-per-node`
    timeout: str | float = "60s"  # how long a rank waits for the others before it gives up

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MAX_RANKS:
            raise ValueError(f"count = {self.count} must be from 1 to {MAX_RANKS}")
        if not 1 <= self.num_parts <= MAX_PARTS:
            raise ValueError(f"parts = {self.parts} must be from 1 to {MAX_PARTS}")
        check_shared(self.num_parts, self.count)
        if self.per_host is not None and (self.per_host < 1 or self.count % self.per_host):
            raise ValueError(f"per_host = {self.per_host} must divide count = {self.count}")
        if not parse_seconds(self.timeout) > 0:
            raise ValueError(f"timeout = {self.timeout!r} must be more than 0 seconds")

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
    # threads of torch; `auto` is one for each core that the process may use, within the quota of a container
    threads: int | Literal["auto"] = "auto"
    # `auto` takes Triton's kernels on CUDA and compiled loops on a CPU if they pass a check at the start; `torch` takes
    # plain torch operations, which are slower
    kernels: Literal["auto", "torch"] = "auto"

    def __post_init__(self) -> None:
        check_threads(self.threads)


class Prefetcher(Section, frozen=True, kw_only=True):
    # decoding processes, 1 to 64; their number does not change the results; npy and Parquet have one more for dense
    # features and labels, and a `package.module:factory` has only one
    workers: int = 1
    threads: int | Literal["auto"] = "auto"  # threads of the planner; `auto` is a quarter of the cores
    # runs the prefetcher only on cores that no other process wants (Linux: SCHED_IDLE): for a trainer on the CPU of an
    # otherwise idle machine; the kernel shares cores between terminals first, so start both processes from one
    # (`python -m rowcast.deploy.local`)
    background: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= MAX_WORKERS:
            raise ValueError(f"workers = {self.workers} must be from 1 to {MAX_WORKERS}")
        check_threads(self.threads)


def check_threads(threads: int | str) -> None:
    if isinstance(threads, int) and not 1 <= threads <= MAX_THREADS:
        raise ValueError(f'threads = {threads} must be "auto" or from 1 to {MAX_THREADS}')


class Metrics(Section, frozen=True, kw_only=True):
    prefetcher: str = "127.0.0.1:9400"  # where it serves /metrics, /healthz and /readyz; port 0 takes any free port
    trainer: str = "127.0.0.1:9401"  # the same for the trainer
    certfile: str | None = None  # a PEM certificate; with it both processes serve https instead of http
    keyfile: str | None = None  # the PEM key of `certfile`

    def __post_init__(self) -> None:
        if (self.certfile is None) != (self.keyfile is None):
            raise ValueError("certfile and keyfile belong together; give both for https, or neither")
        for name in ("prefetcher", "trainer"):
            if not re.fullmatch(r"[^:\s]+:\d{1,5}", getattr(self, name)):
                raise ValueError(f'{name} = {getattr(self, name)!r} must be "host:port"')


CRITEO_KAGGLE_CARDINALITIES = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip


class Job(Section, frozen=True, kw_only=True):
    """A complete, checked job file. `tables` is always filled, from `[[tables]]` or from `[tables_from]`."""

    job: JobSection
    data: Data
    tables: list[Table] = []
    tables_from: TablesFrom | None = None
    model: Model
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
    def table_folder(self) -> Path:
        """The folder for a store that keeps its rows in files."""
        return self.run_dir / "tables" if self.store.path is None else Path(self.store.path)

    @property
    def features(self) -> list[str]:
        """Feature names in the order of every array: tables from top to bottom, their features from left to right."""
        return [feature for table in self.tables for feature in table.features]

    def session_digest(self) -> str:
        """The digest that the two processes compare: all but ports, threads, and what may differ between hosts."""
        content = msgspec.to_builtins(self)
        content.pop("metrics")
        content["trainer"].pop("threads")
        for key in ("threads", "background"):
            content["prefetcher"].pop(key)
        for section, key in (("transport", "endpoint"), ("transport", "keys")):
            content[section].pop(key)
        for key in KEYS_OF_STORES:
            content["store"].pop(key)
        return digest(content)

    def training_digest(self, file_sizes: list[int], hot_rows: str = "") -> str:
        """The digest that a checkpoint compares: all that decides the results, not where or how fast they are made.

        `hot_rows`: the checksum of the rows of data.hot, or "" without.
        """
        content = msgspec.to_builtins(self)
        kept = {name: content[name] for name in ("tables", "model", "optimizer")}
        data = {name: value for name, value in content["data"].items() if name not in NOT_IN_DIGEST}
        parts = self.ranks.num_parts
        order = [] if self.data.order is None else [{"order": self.data.order, "hot_rows": hot_rows}]
        return digest([kept, data, self.job.seed, file_sizes, *([parts] if parts > 1 else []), *order])


# keys of [data]: where files are, how often they are read, and the order, which counts with the rows of data.hot
NOT_IN_DIGEST = ("path", "eval_path", "epochs", "order", "hot")


def digest(content: object) -> str:
    """32 hex digits over the canonical JSON of builtins."""
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def parse_init(init: str, num_embeddings: int) -> tuple[Literal["uniform", "normal", "constant"], float, float]:
    """(kind, a, b): uniform on [a, b), normal with mean a and deviation b, or the constant a. Raises ValueError."""
    try:
        if init == "uniform":
            bound = num_embeddings**-0.5
            return "uniform", -bound, bound
        kind, _, rest = init.partition(":")
        values = [float(value) for value in rest.split(",")]
        if not all(map(math.isfinite, values)):
            raise ValueError("not finite")
        if kind == "uniform" and len(values) == 2 and values[0] <= values[1]:
            return "uniform", values[0], values[1]
        if kind == "normal" and len(values) == 1 and values[0] >= 0:
            return "normal", 0.0, values[0]
        if kind == "constant" and len(values) == 1:
            return "constant", values[0], 0.0
    except ValueError:
        pass
    raise ValueError(f"init = {init!r} is not one of uniform, uniform:lo,hi, normal:std, constant:x")


def init_reach(init: str, num_embeddings: int) -> float:
    """The largest magnitude that a first value can have. Raises ValueError."""
    kind, a, b = parse_init(init, num_embeddings)
    return b * LARGEST_NORMAL if kind == "normal" else max(abs(a), abs(b))
