"""The part of TorchRec's interface that examples/adopt/torchrec_*.py use, for machines without TorchRec."""
