"""``python -m batchrun``."""

from __future__ import annotations

import sys

from batchrun.cli import main

sys.exit(main())
