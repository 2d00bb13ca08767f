"""The part of TorchRec's interface that examples/adopt/torchrec_model.py uses, for machines without TorchRec."""
