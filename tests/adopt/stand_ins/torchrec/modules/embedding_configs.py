from dataclasses import dataclass, field
from enum import Enum


class PoolingType(Enum):
    SUM = "SUM"
    MEAN = "MEAN"
    NONE = "NONE"


class DataType(Enum):
    FP32 = "FP32"


@dataclass
class EmbeddingBagConfig:
    num_embeddings: int
    embedding_dim: int
    name: str = ""
    feature_names: list[str] = field(default_factory=list)
    data_type: DataType = DataType.FP32
    pooling: PoolingType = PoolingType.SUM
    weight_init_max: float | None = None
    weight_init_min: float | None = None


@dataclass
class EmbeddingConfig:
    num_embeddings: int
    embedding_dim: int
    name: str = ""
    feature_names: list[str] = field(default_factory=list)
    data_type: DataType = DataType.FP32
    weight_init_max: float | None = None
    weight_init_min: float | None = None
