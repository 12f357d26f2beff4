"""The oracle: the plan of a forward pass, interpreted in numpy. Slow, plain, and what every kernel is checked against."""

from warpsmith.backend.reference.backend import ReferenceBackend, ReferenceState

__all__ = ["ReferenceBackend", "ReferenceState"]
