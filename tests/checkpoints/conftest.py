from tests.checkpoints.runs import small_files

__all__ = ["small_files"]
