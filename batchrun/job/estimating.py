"""What a job would take: tokens, batches, calls, cost and duration, told before anything is spent."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from batchrun.config import Settings
from batchrun.errors import BatchrunError, Exit
from batchrun.intake.jsonl import OversizedLine
from batchrun.intake.tokens import Calibration, TokenCounter
from batchrun.job.access import preset_for, prices_for, shaper_for
from batchrun.job.pinning import open_any
from batchrun.plan.pack import PackBudget, Packer
from batchrun.records import BadRow, Line, Row, Usage
from batchrun.report.prices import PriceBook
from batchrun.run.batching import UNLIMITED_OUTPUT_TOKENS
from batchrun.run.progress import Console
from batchrun.run.source import scan

__all__ = ["estimate"]

_EXACT_ROWS = 5_000
"""So many rows are counted with the tokenizer; the rest by their size, corrected by what those showed."""

_ASSUMED_LATENCY_S = 3.0
"""A usual reply of a hosted model; used where there is no quota that binds."""


def estimate(input_path: str, settings: Settings, environ: Mapping[str, str], console: Console) -> dict[str, Any]:
    """Returns what running the input would take. Raises: BatchrunError(65) for bad lines, unless they are skipped."""
    preset = preset_for(settings, environ, need_key=False)
    sums = _Sums(settings, prices_for(preset, settings))

    def on_line(_: Line | OversizedLine, shaped: Row | BadRow | None) -> None:
        if isinstance(shaped, Row) and (settings.limit is None or sums.rows < settings.limit):
            sums.add(shaped)

    with open_any(input_path) as stream:
        found = scan(stream, shaper_for(preset, settings), on_line)
    if found.bad_count:
        console.bad_lines(found.bad, found.bad_count)
        if not settings.skip_invalid:
            raise BatchrunError(
                f"{found.bad_count:,} of {found.rows:,} rows are invalid",
                hint="mend them, or estimate the rest with --skip-invalid",
                exit_code=Exit.INPUT,
            )
    if sums.counter.notice:
        console.notice(sums.counter.notice)
    return sums.document()


class _Sums:
    """What the rows add up to, in memory that does not grow with them."""

    def __init__(self, settings: Settings, prices: PriceBook) -> None:
        self.settings = settings
        self.prices = prices
        self.counter = TokenCounter()
        self.calibration = Calibration()
        self.packer = Packer(PackBudget(settings.batch_tokens, settings.batch_rows, settings.batch_bytes))
        self.rows = 0
        self.batches = 0
        self.input_tokens = 0
        self.most_output = 0
        self.unlimited = 0
        self.least_usd = Decimal(0)
        self.most_usd = Decimal(0)
        self.unpriced: dict[str, int] = {}

    def add(self, row: Row) -> None:
        guess = self.counter.estimate(row)
        if self.rows < _EXACT_ROWS:
            tokens = self.counter.count(row)
            self.calibration.observe(row.model, guess, tokens)
        else:
            tokens = self.calibration.correct(row.model, guess)
        row.tokens = tokens
        self.rows += 1
        self.input_tokens += tokens
        most = row.max_output
        if most is None:
            self.unlimited += 1
            most = UNLIMITED_OUTPUT_TOKENS
        self.most_output += most
        least_usd = self.prices.price(row.model, Usage(tokens, 0))
        most_usd = self.prices.worst(row.model, tokens, most)
        if least_usd is None or most_usd is None:
            self.unpriced[row.model] = self.unpriced.get(row.model, 0) + 1
        else:
            self.least_usd += least_usd
            self.most_usd += most_usd
        self.packer.add(row, tokens + (row.max_output or 0))
        while self.packer.pack() is not None:
            self.batches += 1

    def document(self) -> dict[str, Any]:
        self.batches += sum(1 for _ in self.packer.flush())
        seconds, binding = self._duration()
        return {
            "rows": self.rows,
            "calls": self.rows,
            "batches": self.batches,
            "tokens": {"input": self.input_tokens, "output_max": self.most_output},
            "rows_counted_exactly": min(self.rows, _EXACT_ROWS),
            "rows_without_output_limit": self.unlimited,
            "cost_usd": {"min": self.least_usd, "max": self.most_usd},
            "cost_unknown_rows": sum(self.unpriced.values()),
            "models_without_price": sorted(self.unpriced),
            "duration_s": seconds,
            "binding": binding,
        }

    def _duration(self) -> tuple[float, str]:
        """Returns the longest of what each limit alone would take, and that limit's name."""
        settings = self.settings
        in_flight = settings.concurrency or settings.max_concurrency
        bounds = [
            (self.rows * _ASSUMED_LATENCY_S / in_flight, f"{in_flight} in flight at {_ASSUMED_LATENCY_S:g} s each")
        ]
        if settings.rpm is not None:
            bounds.append((self.rows / settings.rpm * 60, "requests per minute"))
        if settings.tpm is not None:
            bounds.append((self.input_tokens / settings.tpm * 60, "tokens per minute"))
        return max(bounds)
