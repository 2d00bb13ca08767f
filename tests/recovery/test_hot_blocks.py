"""Hot blocks with two real processes: the plain loop's bits over a restart, and no restart with other hot rows."""

from pathlib import Path

import numpy as np

from rowcast.prefetcher.readers.pin_files import save_pins
from tests.recovery.restarted import end_well
from tests.support.comparisons import assert_trained_as_the_plain_loop
from tests.support.data_files import write_day
from tests.support.jobs import table
from tests.support.processes import Session

TABLES = [table("narrow", 30, 4, "cat_0", "cat_1"), table("wide", 30, 4, "cat_2")]


def test_a_run_in_hot_blocks_goes_on_with_the_plain_loops_bits_and_not_with_other_hot_rows(
    session: Session, tmp_path: Path
) -> None:
    write_day(tmp_path, "day_0", 500, num_ids=30)
    hot = tmp_path / "hot"
    save_pins(hot, {"narrow": np.arange(22), "wide": np.arange(22)}, {})
    session.write_job(
        data={
            "format": "criteo-npy",
            "path": str(tmp_path / "day_0_dense.npy"),
            "batch_size": 16,
            "epochs": 2,
            "eval_fraction": 0.1,
            "shuffle": "window:200",
            "order": "hot-blocks:3",
            "hot": str(hot),
            "synthetic": None,
        },
        tables=TABLES,
        cache={"capacity": "50 rows"},
        prefetcher={"workers": 2},
    )
    end_well(*session.start_both("--max-steps=21"))
    assert session.manifest().train_steps == 21
    assert (session.run_dir / "order" / "hot-samples").exists()
    first_rows = hot.read_bytes()
    save_pins(hot, {"narrow": np.arange(25), "wide": np.arange(25)}, {})
    sentence = session.start("prefetcher").ended().refused(5)
    assert "the checkpoint after 21 train steps" in sentence
    assert f"the rows of data.hot = '{hot}' differ" in sentence
    hot.write_bytes(first_rows)
    end_well(*session.start_both())
    assert_trained_as_the_plain_loop(session)
