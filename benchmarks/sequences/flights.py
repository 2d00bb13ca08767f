"""Writes the flights log as (tail, flight, time): date and time of departure are columns of their own there.

    python -m benchmarks.sequences.flights hflights.parquet data/flights.parquet
    python -m examples.next_item data/flights.parquet --owner tail --item flight --time time --out data/next-flight

Cancelled flights have no time of departure, and next_item leaves them out with the lines without a tail.
"""

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    log = pq.read_table(options.log)
    year, month, day, departure = (log[name].to_numpy() for name in ("Year", "Month", "DayofMonth", "DepTime"))
    months = (year - 1970).astype("datetime64[Y]").astype("datetime64[M]") + (month - 1)
    cancelled = np.isnan(departure)
    clock = np.where(cancelled, 0, departure).astype(np.int64)  # 1830 is half past six in the evening
    seconds = (months.astype("datetime64[D]") + (day - 1)).astype("datetime64[s]").astype(np.int64)
    seconds += clock // 100 * 3600 + clock % 100 * 60
    options.out.parent.mkdir(parents=True, exist_ok=True)
    columns = {"tail": log["TailNum"], "flight": log["FlightNum"], "time": pa.array(seconds, mask=cancelled)}
    pq.write_table(pa.table(columns), options.out)


if __name__ == "__main__":
    main()
