"""Copies the newest version and those below it, CURRENT last: a copy stopped anywhere is never half a version.

python -m examples.copy_versions served host:served                          by `rsync -a`
python -m examples.copy_versions served s3://bucket/served aws s3 cp --recursive
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

source, target, *command = sys.argv[1:]
copy = command or ["rsync", "-a"]
newest = (Path(source) / "CURRENT").read_text()  # read first: later versions wait for the next copy
version = json.loads((Path(source) / newest.split()[0] / "version.json").read_bytes())
below = [number for number, _ in version["below"]] if "below" in version else range(version["base"], version["number"])
for number in [*below, version["number"]]:  # an earlier rowcast did not write `below`
    subprocess.run([*copy, f"{source}/v{number:012d}/", f"{target}/v{number:012d}/"], check=True)
with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "CURRENT").write_text(newest)
    subprocess.run([*copy, f"{folder}/", f"{target}/"], check=True)
