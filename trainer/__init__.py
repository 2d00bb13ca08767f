"""The device side: executes plans on the device cache and trains the model."""
