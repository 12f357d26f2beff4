"""argparse with our errors: one sentence and one fix instead of the usage."""

from __future__ import annotations

import argparse
from typing import NoReturn

from warpsmith.errors import BadRequest


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        sentence = f"{message[:1].upper()}{message[1:]}".rstrip(".")
        raise BadRequest(f"{sentence}.", f"`{self.prog} --help` lists what there is.")
