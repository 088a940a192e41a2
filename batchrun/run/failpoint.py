"""Named places where a test breaks a run: ``BATCHRUN_FAILPOINT=name[:n][:action]``, the n-th time it gets there.

Actions are ``kill`` (the default; SIGKILL, as if the power went), ``exit`` (at once, with status 70) and ``raise`` (an
OSError of the disk). Unset, a place costs the call of an empty function.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable

__all__ = ["reached"]


def _nothing(name: str) -> None:
    """Says that a run got to the place ``name``."""


def _armed(spec: str) -> Callable[[str], None]:
    name, *rest = spec.split(":")
    action = rest.pop() if rest and not rest[-1].isdigit() else "kill"
    left = int(rest[0]) if rest else 1

    def reached(place: str) -> None:
        nonlocal left
        if place != name:
            return
        left -= 1
        if left != 0:
            return
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "exit":
            os._exit(70)
        raise OSError(errno.EIO, f"failpoint {name}")

    return reached


_spec = os.environ.get("BATCHRUN_FAILPOINT")
reached: Callable[[str], None] = _armed(_spec) if _spec else _nothing
