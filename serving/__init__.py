"""Serves what was trained: `rowcast publish` writes versions of a model to a folder, `Model` reads them."""

from rowcast.serving.model import Model

__all__ = ["Model"]
