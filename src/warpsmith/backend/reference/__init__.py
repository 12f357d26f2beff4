"""The oracle: the plan of a forward pass, interpreted in numpy. Every kernel is checked against it."""

from warpsmith.backend.reference.backend import ReferenceBackend, ReferenceState

__all__ = ["ReferenceBackend", "ReferenceState"]
