"""As much of TorchRec's face as examples/adopt/torchrec_model.py uses, so that the example runs where TorchRec is not installed."""
