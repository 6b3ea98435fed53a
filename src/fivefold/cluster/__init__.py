"""What a model is trained on: devices, the tiers of their network, the time of a collective."""
