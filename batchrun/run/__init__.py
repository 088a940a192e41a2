"""Run: the shell; everything that touches the world."""

import sys

# httpx looks for its own command line, and for click, rich and pygments with it: 50 ms of every start. It takes their
# absence well.
sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]
