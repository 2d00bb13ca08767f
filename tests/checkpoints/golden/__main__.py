from rowcast.job.file import load_job
from rowcast.runtime.checkpoint_manifest import (
    MANIFEST_VERSION,
    BatchChecksum,
    Manifest,
    Position,
    RowFile,
    RowLayer,
    ShardLayers,
)
from rowcast.runtime.disk import render, seal
from tests.checkpoints.golden import ALL_KEYS, DATA, FOLDER


def rows(folder: str) -> RowFile:
    name = f"{folder}/fp32_d4_sgd-00000.safetensors"
    return RowFile(group="fp32_d4_sgd", file=name, first_key=7, last_key=7, num_rows=1, nbytes=300, checksum="3" * 16)


manifest = Manifest(
    version=MANIFEST_VERSION,
    run_id="0123456789ab",
    position=Position(step=110, train_step=100),
    finished=False,
    reason="checkpoint",
    job=load_job(FOLDER / f"{ALL_KEYS}.toml").content(),
    trained_on=DATA[ALL_KEYS],
    shards=(
        ShardLayers(
            layers=(
                RowLayer(kind="base", num_rows=1, files=(rows("step-000000000100"),)),
                RowLayer(kind="delta", num_rows=1, files=(rows("step-000000000110"),), after="2" * 16),
            ),
            ahead=(BatchChecksum(train_step=100, eval_batch=None, ids="1" * 16, dense=""),),
        ),
    ),
    dense=None,
)
(FOLDER / f"{ALL_KEYS}.version-{MANIFEST_VERSION}.json").write_bytes(render(seal(manifest)))
