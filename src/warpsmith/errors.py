"""Errors a user can act on: one sentence that says what is wrong, one that says what to do about it."""

from __future__ import annotations


class WarpsmithError(Exception):
    """Base of every error we raise on purpose. `exit_code` is what the command line returns for it."""

    exit_code = 1
    usual_fix = ""  # for errors that name no other

    def __init__(self, problem: str, fix: str = "") -> None:
        self.problem, self.fix = problem, fix or self.usual_fix
        super().__init__(f"{self.problem} {self.fix}".strip())


class BadFile(WarpsmithError):
    """A model file is truncated, corrupt, hostile or of a kind we do not read. Names the file and the field."""

    usual_fix = "Download the model again, or use another file of it."


class BadRequest(WarpsmithError):
    """The caller asked for something that cannot be done as asked."""

    exit_code = 2


class ContextFull(BadRequest):
    """The prompt leaves no room for an answer."""


class ModelNotFound(WarpsmithError):
    """No such model here, or none can be fetched (offline, wrong name)."""

    exit_code = 3


class NoDevice(WarpsmithError):
    """The device asked for cannot be used on this machine."""

    exit_code = 4


class DoesNotFit(WarpsmithError):
    """The memory plan is larger than the memory."""

    exit_code = 5
