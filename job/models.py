"""Lists the built-in models of `model.kind` and their settings, without importing torch.

A new one is a line here and the model's file; settings of its own are a struct above the line.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Annotated, Any, Literal

from msgspec import Meta

from rowcast.job.embedding_tables import Table, is_constant
from rowcast.job.section import Kinds, Section
from rowcast.runtime.errors import nearest

MODELS = "rowcast.trainer.models"
# the model is in a training script of its own; the name that run folders have had since `rowcast.connect` wrote them
NO_MODEL = "rowcast.trainer.adopt.connect.settings:refuse_model"
ANY, EMBEDDING_DIM, ONE = "[...]", "[..., embedding_dim]", "[..., 1]"
Width = Annotated[int, Meta(ge=1, le=2**20)]
Widths = list[Width]


class ModelSettings(Section, frozen=True, kw_only=True):
    # {kinds}, or `package.module:factory` for any `nn.Module` that takes (dense, list of embeddings), and a list of
    # linear weights if a table has them; a method `loss(outputs, labels)` of the module replaces binary cross entropy
    kind: str = "dlrm"
    # the precision of the model's matrix products: `fp32`, `tf32` (CUDA) or `bf16` (torch.autocast); weights,
    # embeddings and loss stay in fp32
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    # runs full train batches through torch.compile, which needs a C++ compiler on the CPU and Triton on CUDA; the bits
    # of the results differ from those without it
    compile: bool = False
    # `regression`: a built-in model predicts the number that is the label; needs `data.columns.label_values = "real"`
    task: Literal["classification", "regression"] = "classification"
    # of a regression: mean and deviation of the labels; what is learned is (label - mean) / deviation
    target: tuple[float, float] = (0.0, 1.0)
    error: Literal["squared", "huber"] = "squared"  # of a regression; `huber`: linear beyond one deviation
    options: dict[str, Any] = {}  # passed to the `package.module:factory`

    def check(self) -> None:
        own = BUILT_IN_MODELS.get(self.kind)
        if self.task == "regression" and (own is None or not own.one_logit):
            raise ValueError(f'task = "regression": {self.kind} has a loss of its own; remove it')
        if not all(map(isfinite, self.target)) or self.target[1] <= 0:
            raise ValueError(f"target = {list(self.target)} must be a finite mean and a deviation above 0")
        if own is not None and not all(self._ends_in(name, end) for name, end in own.layers.items()):
            needed = " and ".join(f"{name} = {end}" for name, end in own.layers.items())
            raise ValueError(f"{self.kind} needs {needed}")

    def _ends_in(self, name: str, end: str) -> bool:
        """Whether the layer's widths are given and end as they must; the tables' width is checked elsewhere."""
        widths = getattr(self, name)
        return bool(widths) and (end != ONE or widths[-1] == 1)

    def check_inputs(self, tables: Mapping[str, Table], num_parts: int) -> None:
        """Checks the tables by feature, and the parts of a batch. Raises ValueError."""


class BottomAndTop(ModelSettings, frozen=True, kw_only=True):
    # the output widths of its layers, each followed by ReLU; for dlrm and tbsm the last is `embedding_dim`
    bottom_mlp: Widths = []
    # the output widths of its layers; the last is 1, without ReLU; tbsm: the last is the width of a time step's vector,
    # with ReLU
    top_mlp: Widths = []


class DLRMSettings(BottomAndTop, frozen=True, kw_only=True):
    # how the products of all pairs are computed: `bmm` by torch, or `fused` in one pass over the embeddings, with
    # other bits: kernels on CUDA, and much slower plain torch operations on a CPU; `fused` refuses `compile`
    interaction: Literal["bmm", "fused"] = "bmm"

    def check(self) -> None:
        super().check()
        if self.interaction == "fused" and self.compile:
            raise ValueError(
                'model.interaction = "fused" has kernels of its own, which model.compile = true cannot compile; remove '
                "one of the two"
            )


class DCNv2Settings(BottomAndTop, frozen=True, kw_only=True):
    cross_layers: Width = 3  # the number of layers of the cross network
    cross_rank: Width = 512  # the rank of a cross layer: the width between its two matrices


class TBSMSettings(BottomAndTop, frozen=True, kw_only=True):
    history: Width = 20  # the time steps used before the last entry of a sequence, which is the target
    # the hidden widths between the `history` products with the target and the `history` coefficients
    attention_mlp: Widths = []
    final_mlp: Widths = []  # the output widths of its layers; the last is 1, without ReLU


class Top(ModelSettings, frozen=True, kw_only=True):
    top_mlp: Widths = []  # the output widths of its layers; the last is 1, without ReLU


class DINSettings(Top, frozen=True, kw_only=True):
    history: Width = 20  # the entries used of a history; older entries are ignored
    attention_mlp: Widths = []  # the hidden widths between target and entry and the entry's coefficient
    # the target of each history, both features of one table with `pooling = "none"`, such as
    # `{ bought = "item" }`; several histories are joined entry by entry
    targets: dict[str, str] = {}
    activation: Literal["dice", "prelu"] = "dice"  # of each hidden layer; `dice` refuses `ranks.parts`
    softmax: bool = False  # whether the coefficients of a history add up to 1

    def check_inputs(self, tables: Mapping[str, Table], num_parts: int) -> None:
        """Each history and its target are in one table, without pooling, and there are no other sequences."""
        if not self.targets:
            raise ValueError(
                'din needs model.targets, the target of each history, such as targets = { bought = "item" }'
            )
        require_features([*self.targets, *self.targets.values()], "model.targets", tables)
        for history, target in self.targets.items():
            if tables[history].name != tables[target].name or history == target:
                raise ValueError(
                    f"model.targets: history {history} has table {tables[history].name} and target {target} has "
                    f"{tables[target].name}; list them as two features of one table"
                )
            if tables[history].pooling != "none":
                raise ValueError(
                    f"model.targets: table {tables[history].name} of history {history} has pooling = "
                    f'"{tables[history].pooling}"; set "none"'
                )
        used = {*self.targets, *self.targets.values()}
        for feature, table in tables.items():
            if table.pooling == "none" and feature not in used:
                raise ValueError(
                    f'feature {feature} is in no pair of model.targets, but table {table.name} has pooling = "none"; '
                    'add it to a pair, or give it a table with "sum" or "mean"'
                )
        if self.activation == "dice" and num_parts > 1:
            raise ValueError(
                f'model.activation = "dice" keeps running means, which have no one result where a batch is trained in '
                f'parts (ranks.parts = {num_parts}); set "prelu"'
            )


class TwoTowerSettings(ModelSettings, frozen=True, kw_only=True):
    item_features: list[str] = []  # the features of the item; all others and dense features are the user's
    user_mlp: Widths = []  # the output widths of its layers; the last is without ReLU
    item_mlp: Widths = []  # the same for the items; the last is that of `user_mlp`
    temperature: Annotated[float, Meta(gt=0)] = 0.05  # divides the cosine of user and item
    # the dense feature, counted from 0, that holds the natural logarithm of how often the sample's item occurs in the
    # data (a count or a fraction: constants cancel); the in-batch softmax subtracts it, and the user's tower does not
    # see it; without it nothing is subtracted
    log_frequency: Annotated[int, Meta(ge=0)] | None = None

    def check(self) -> None:
        super().check()
        if self.user_mlp[-1] != self.item_mlp[-1]:
            raise ValueError(
                f"user_mlp ends in {self.user_mlp[-1]} and item_mlp in {self.item_mlp[-1]}; two-tower needs them equal"
            )

    def check_inputs(self, tables: Mapping[str, Table], num_parts: int) -> None:
        """Some features are the item's, and different items differ at first."""
        if not self.item_features:
            raise ValueError('two-tower needs model.item_features, such as item_features = ["item", "category"]')
        require_features(self.item_features, "model.item_features", tables)
        if all(is_constant(tables[feature]) for feature in self.item_features):
            table = tables[self.item_features[0]]
            raise ValueError(
                f'model.item_features: all rows of table {table.name} begin as init = "{table.init}", so that items '
                'could not be told apart; use "uniform"'
            )


class NextItemSettings(ModelSettings, frozen=True, kw_only=True):
    history: Width = 50  # the items used of a history; older ones are ignored
    blocks: Width = 2  # the layers of attention
    heads: Width = 1  # heads of a layer of attention; the number must divide the width of the item table
    dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    history_feature: str = "history"  # the feature of the history, with `pooling = "none"`
    positive_feature: str = "positive"  # what came next, aligned with the end of the history
    # what each positive is ranked among, a feature of the batch (`data.of`): drawn items (`data.negatives`) or all
    candidate_feature: str = "negative"
    time: str = "time"  # hstu: the array with the time of each item of the history

    def check_inputs(self, tables: Mapping[str, Table], num_parts: int) -> None:
        """History, positives and candidates are features of one table, without pooling."""
        names = {
            "history_feature": self.history_feature,
            "positive_feature": self.positive_feature,
            "candidate_feature": self.candidate_feature,
        }
        for key, name in names.items():
            require_features([name], f"model.{key}", tables)
        for feature in tables:
            if feature not in names.values():
                raise ValueError(f"feature {feature}: {self.kind} has no use for it; remove it from its table")
        items = tables[self.history_feature]
        for key, name in names.items():
            if tables[name].name != items.name or tables[name].pooling != "none":
                raise ValueError(
                    f"model.{key}: feature {name} has table {tables[name].name} with pooling = "
                    f'"{tables[name].pooling}"; {self.kind} needs history, positives and candidates in one table with '
                    'pooling = "none"'
                )
        if items.embedding_dim % self.heads:
            raise ValueError(
                f"model.heads = {self.heads} does not divide embedding_dim = {items.embedding_dim} of table "
                f"{items.name}; change one of them"
            )


def require_features(features: Sequence[str], key: str, tables: Mapping[str, Table]) -> None:
    for feature in features:
        if feature not in tables:
            raise ValueError(
                f"{key}: feature {feature} has no table{nearest(feature, tables)}; add it to a table's features"
            )


@dataclass(frozen=True, slots=True)
class BuiltInModel:
    factory: str  # "module:factory", called with (job, num_dense) and imported only by the trainer
    settings: type[ModelSettings]  # the keys of [model]
    # the lists of output widths that the section must have, and how each ends
    layers: Mapping[str, str] = field(default_factory=dict)
    sequences: str = ""  # its use of features that are not pooled; empty if it has none
    linear: bool = False  # needs linear weights of at least one table
    one_logit: bool = True  # for a sample, so that a regression can be made of it
    one_width: bool = False  # needs tables of one embedding_dim
    note: str = ""  # for docs/job-file.md


NEXT_ITEM = "history, positives and candidates are features of one table"
BUILT_IN_MODELS = {
    "dlrm": BuiltInModel(f"{MODELS}.dlrm:DLRM", DLRMSettings, {"bottom_mlp": EMBEDDING_DIM, "top_mlp": ONE}),
    "dcnv2": BuiltInModel(f"{MODELS}.dlrm:DCNv2", DCNv2Settings, {"bottom_mlp": ANY, "top_mlp": ONE}),
    "tbsm": BuiltInModel(
        f"{MODELS}.din:TBSM",
        TBSMSettings,
        {"bottom_mlp": EMBEDDING_DIM, "top_mlp": ANY, "final_mlp": ONE},
        sequences="the last entry of a sequence is the target, the entries before it are the history",
    ),
    "din": BuiltInModel(
        f"{MODELS}.din:DIN", DINSettings, {"top_mlp": ONE}, sequences="a history and its target are features of it"
    ),
    "wide-deep": BuiltInModel(f"{MODELS}.dlrm:WideDeep", Top, {"top_mlp": ONE}, linear=True),
    "deepfm": BuiltInModel(f"{MODELS}.dlrm:DeepFM", Top, {"top_mlp": ONE}, linear=True, one_width=True),
    "sasrec": BuiltInModel(f"{MODELS}.next_item:SASRec", NextItemSettings, sequences=NEXT_ITEM, one_logit=False),
    "hstu": BuiltInModel(f"{MODELS}.next_item:HSTU", NextItemSettings, sequences=NEXT_ITEM, one_logit=False),
    "two-tower": BuiltInModel(
        f"{MODELS}.dlrm:TwoTower", TwoTowerSettings, {"user_mlp": ANY, "item_mlp": ANY}, one_logit=False
    ),
}
ModelSettings.kinds = Kinds(BUILT_IN_MODELS, custom=BottomAndTop)
