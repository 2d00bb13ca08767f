"""Lists the built-in models of `model.kind` without importing torch. A new one is a line here and the model's file."""

from dataclasses import dataclass

MODELS = "rowcast.trainer.models"
ANY, EMBEDDING_DIM, ONE = "[...]", "[..., embedding_dim]", "[..., 1]"


@dataclass(frozen=True, slots=True)
class BuiltInModel:
    factory: str  # "module:factory", called with (job, num_dense) and imported only by the trainer
    layers: dict[str, str]  # the lists of output widths that the section must have, and how each ends
    sequences: bool = False  # needs at least one feature that is not pooled
    note: str = ""  # for docs/job-file.md


BUILT_IN_MODELS = {
    "dlrm": BuiltInModel(f"{MODELS}.dlrm:DLRM", {"bottom_mlp": EMBEDDING_DIM, "top_mlp": ONE}),
    "dcnv2": BuiltInModel(f"{MODELS}.dcnv2:DCNv2", {"bottom_mlp": ANY, "top_mlp": ONE}),
    "tbsm": BuiltInModel(
        f"{MODELS}.tbsm:TBSM", {"bottom_mlp": EMBEDDING_DIM, "top_mlp": ANY, "final_mlp": ONE}, sequences=True
    ),
}
