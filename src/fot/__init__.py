"""Federated Orthogonal Training: one global model that learns task after task and forgets none."""

__version__ = "0.1.0"
