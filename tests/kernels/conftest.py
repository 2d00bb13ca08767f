"""Kernels for devices are run by Triton's interpreter, which is asked for when they are imported, and only then."""

from collections.abc import Iterator

import pytest

try:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        import triton.experimental.gluon  # noqa: F401  the first launch would import it, and ask once more

        import rowcast.trainer.kernels.triton_ops  # noqa: F401
        from tests.kernels.interpreter import mend
except ImportError:
    collect_ignore_glob = ["test_triton*.py"]
else:

    @pytest.fixture(autouse=True)
    def mended() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            mend(patch)
            yield
