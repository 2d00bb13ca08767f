"""Lists the built-in models of `model.kind` without importing torch. A new one is a line here and the model's file."""

from dataclasses import dataclass

MODELS = "rowcast.trainer.models"
ANY, EMBEDDING_DIM, ONE = "[...]", "[..., embedding_dim]", "[..., 1]"


@dataclass(frozen=True, slots=True)
class BuiltInModel:
    factory: str  # "module:factory", called with (job, num_dense) and imported only by the trainer
    layers: dict[str, str]  # the lists of output widths that the section must have, and how each ends
    sequences: str = ""  # what features that are not pooled are to it; empty if it takes none
    keys: tuple[str, ...] = ()  # the keys besides `layers` that it reads, of those that some models do not have
    linear: bool = False  # needs linear weights of at least one table
    one_width: bool = False  # needs tables of one embedding_dim
    note: str = ""  # for docs/job-file.md


BUILT_IN_MODELS = {
    "dlrm": BuiltInModel(f"{MODELS}.dlrm:DLRM", {"bottom_mlp": EMBEDDING_DIM, "top_mlp": ONE}),
    "dcnv2": BuiltInModel(
        f"{MODELS}.dcnv2:DCNv2", {"bottom_mlp": ANY, "top_mlp": ONE}, keys=("cross_layers", "cross_rank")
    ),
    "tbsm": BuiltInModel(
        f"{MODELS}.tbsm:TBSM",
        {"bottom_mlp": EMBEDDING_DIM, "top_mlp": ANY, "final_mlp": ONE},
        sequences="the last entry of a sequence is the target, the entries before it are the history",
        keys=("attention_mlp", "history"),
    ),
    "din": BuiltInModel(
        f"{MODELS}.din:DIN",
        {"top_mlp": ONE},
        sequences="a history and its target are features of it",
        keys=("attention_mlp", "history", "targets", "activation", "softmax"),
    ),
    "wide-deep": BuiltInModel(f"{MODELS}.wide_deep:WideDeep", {"top_mlp": ONE}, linear=True),
    "deepfm": BuiltInModel(f"{MODELS}.wide_deep:DeepFM", {"top_mlp": ONE}, linear=True, one_width=True),
    "two-tower": BuiltInModel(
        f"{MODELS}.two_tower:TwoTower",
        {"user_mlp": ANY, "item_mlp": ANY},
        keys=("item_features", "temperature", "log_frequency"),
    ),
}
