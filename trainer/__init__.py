"""The trainer process: executes plans on the device cache and trains the model."""
