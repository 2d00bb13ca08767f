"""A small job of a next-item model."""

from rowcast.job.schema import Job
from tests.support import jobs

WIDTH, HEADS, LENGTH, ITEMS = 8, 2, 6, 40
KINDS = ("sasrec", "hstu")


def job_of(kind: str, **settings: object) -> Job:
    table = {
        "name": "item",
        "num_embeddings": ITEMS,
        "embedding_dim": WIDTH,
        "features": ["history", "positive", "negative"],
        "pooling": "none",
    }
    model = {"kind": kind, "history": LENGTH, "heads": HEADS, **settings}
    return jobs.job(tables=[table], data={"negatives": [{"feature": "negative", "number": 11}]}, model=model)
