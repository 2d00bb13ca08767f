from tests.checkpoints.fake_run import small_files

__all__ = ["small_files"]
