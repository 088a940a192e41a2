"""What a job would take: tokens, batches, calls, cost and duration, told before anything is spent."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any, BinaryIO

from batchrun.config import Settings, SimSettings
from batchrun.errors import BatchrunError, Exit
from batchrun.intake.jsonl import OversizedLine, read_lines
from batchrun.intake.shapes import Shaper
from batchrun.intake.tokens import Calibration, TokenCounter
from batchrun.job.access import packings_for, preset_for, prices_for, shaper_for
from batchrun.job.pinning import grouped, may_group, open_any
from batchrun.plan.schedule import Flow
from batchrun.plan.simulate import ServerModel, Work, simulate
from batchrun.providers.packing import Packing
from batchrun.providers.presets import Preset
from batchrun.records import BadRow, Batch, Call, Endpoint, Line, Opened, Row, Usage
from batchrun.report.packed import Packed, packing_figures
from batchrun.report.prices import PriceBook
from batchrun.run.batching import UNLIMITED_OUTPUT_TOKENS, Packers
from batchrun.run.prefixes import Prefixes
from batchrun.run.progress import Console
from batchrun.run.source import scan

__all__ = ["estimate"]

_EXACT_ROWS = 5_000
"""So many rows are counted with the tokenizer; the rest by their size, corrected by what those showed."""

_UNIT = 1_000
"""Tokens that the saving of a cache is told by: a price of many at once would be that of a long prompt."""

_ASSUMED_LATENCY_S = 3.0
"""A usual reply of a hosted model."""

_ASSUMED_SHARE = 2
"""Answers are expected to be one part in so many of what a row allows …"""

_ASSUMED_OUTPUT = 256
"""… or this long, in tokens, where it allows more, or names no limit."""


def estimate(
    input_path: str, settings: Settings, environ: Mapping[str, str], console: Console, *, simulated: bool = False
) -> dict[str, Any]:
    """Returns what running the input would take; ``simulated``: by running the real plan over it in virtual time.

    Raises: BatchrunError(65) for bad lines, unless they are skipped.
    """
    preset = preset_for(settings, environ, need_key=False)
    if simulated and input_path == "-":
        raise BatchrunError("--simulate reads the input twice", hint="give a file, not stdin")
    with contextlib.closing(Prefixes()) as prefixes:
        return _estimate(input_path, settings, preset, prefixes, console, simulated=simulated)


def _estimate(
    input_path: str, settings: Settings, preset: Preset, prefixes: Prefixes, console: Console, *, simulated: bool
) -> dict[str, Any]:
    sums = _Sums(settings, prices_for(preset, settings), packings_for(preset, settings), prefixes)

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
    document = sums.document()
    if simulated:
        with open_any(input_path) as stream:
            document |= _simulated(settings, preset, sums, _rows(stream, shaper_for(preset, settings), settings.limit))
    return document


def _rows(stream: BinaryIO, shaper: Shaper, limit: int | None) -> Iterator[Row]:
    """Yields the good rows of a stream, up to ``limit``."""
    shaped = (shaper.shape(line) for line in read_lines(stream))
    return itertools.islice((row for row in shaped if isinstance(row, Row)), limit)


def _simulated(settings: Settings, preset: Preset, sums: _Sums, rows: Iterator[Row]) -> dict[str, Any]:
    """Runs the plan over the rows, in virtual time, against a server that has the given limits and tells them."""
    sim = settings.sim
    rpm, tpm = sim.rpm or settings.rpm, sim.tpm or settings.tpm
    latency_s = sim.latency_s if sim.latency_s != SimSettings().latency_s else _ASSUMED_LATENCY_S
    server = ServerModel(
        latency_s=latency_s,
        calls_per_s=None if rpm is None else rpm / 60,
        burst_calls=rpm or 1,
        tokens_per_s=None if tpm is None else tpm / 60,
        burst_tokens=tpm or 1,
        counts_max_tokens=preset.counts_max_tokens,
        hints=True,
        headers=True,
        error_share=sim.error_rate,
        timeout_s=settings.timeout_s,
    )
    flow = Flow(
        max_concurrency=settings.max_concurrency,
        concurrency=settings.concurrency,
        rpm=settings.rpm,
        tpm=settings.tpm,
        max_attempts=settings.max_attempts,
        patience_s=settings.patience_s,
        deadline_at=settings.deadline_s,
        budget_usd=settings.budget_usd,
        total=sums.rows,
        counts_max_tokens=preset.counts_max_tokens,
    )
    result = simulate(flow, server, sums.work(rows), seed=sim.seed)
    return {
        "duration_s": result.duration_s,
        "binding": result.binding,
        "simulated": {
            "latency_s": latency_s,
            "sends": result.sends,
            "refused": result.refused,
            "faulted": result.faulted,
            "succeeded": result.succeeded,
            "failed": result.failed,
            "max_in_flight": result.max_in_flight,
            "cost_usd": result.cost_usd,
            "cost_unknown_rows": result.unpriced,
            "stopped": "no" if result.stop is None else f"{result.stop.reason}: {result.stop.detail}",
            "bound_s": dict(sorted(result.bound_s.items(), key=lambda item: -item[1])),
        },
    }


class _Sums:
    """What the rows add up to, in memory that does not grow with them."""

    def __init__(
        self, settings: Settings, prices: PriceBook, packings: Mapping[Endpoint, Packing], prefixes: Prefixes
    ) -> None:
        self.settings = settings
        self.prices = prices
        self.prefixes = prefixes
        self.sizes: dict[str, tuple[int, int]] = {}
        """Model → tokens and bytes of its rows."""
        self.counter = TokenCounter()
        self.calibration = Calibration()
        self.packings = packings
        self.packers = Packers(settings, packings)
        self.packed = Packed()
        self.rows = 0
        self.batches = 0
        self.calls = 0
        self.input_tokens = 0
        self.most_output = 0
        self.unlimited = 0
        self.least_usd = Decimal(0)
        self.expected_usd = Decimal(0)
        self.most_usd = Decimal(0)
        self.unpriced: dict[str, int] = {}

    def add(self, row: Row) -> None:
        guess = self.counter.estimate(row)
        row.tokens = self._tokens(row, self.rows)
        if self.rows < _EXACT_ROWS:
            self.calibration.observe(row.model, guess, row.tokens)
        self.rows += 1
        self.input_tokens += row.tokens
        tokens, size = self.sizes.get(row.model, (0, 0))
        self.sizes[row.model] = tokens + row.tokens, size + len(row.body)
        if may_group(self.settings):
            self.prefixes.add(row)
        self.unlimited += row.max_output is None
        self.most_output += _most_output(row)
        prices = (
            self.prices.price(row.model, Usage(row.tokens, 0)),
            self.prices.price(row.model, Usage(row.tokens, _expected_output(row))),
            self.prices.worst(row.model, row.tokens, _most_output(row)),
        )
        least_usd, expected_usd, most_usd = prices
        if least_usd is None or expected_usd is None or most_usd is None:
            self.unpriced[row.model] = self.unpriced.get(row.model, 0) + 1
        else:
            self.least_usd += least_usd
            self.expected_usd += expected_usd
            self.most_usd += most_usd
        for _, opened in self.packers.add(row, row.tokens + (row.max_output or 0)):
            self._open(opened)

    def _tokens(self, row: Row, before: int) -> int:
        """Returns the input tokens of a row that comes after so many others."""
        if before < _EXACT_ROWS:
            return self.counter.count(row)
        return self.calibration.correct(row.model, self.counter.estimate(row))

    def _open(self, opened: Opened) -> None:
        self.batches += 1
        self.calls += opened.rows if opened.packing is None else 1
        self.packed.opened(opened)

    def work(self, rows: Iterable[Row]) -> Iterator[Work]:
        """Yields the calls that the rows travel in, with what is expected to come of them."""
        packers = Packers(self.settings, self.packings)
        for before, row in enumerate(rows):
            row.tokens = self._tokens(row, before)
            for batch, opened in packers.add(row, row.tokens + (row.max_output or 0)):
                yield from self._works(batch, opened)
        for batch, opened in packers.flush():
            yield from self._works(batch, opened)

    def _works(self, batch: Batch, opened: Opened) -> Iterator[Work]:
        for rows in [batch.rows] if opened.packing is not None else [(row,) for row in batch.rows]:
            worst = [self.prices.worst(row.model, row.tokens, _most_output(row)) or Decimal(0) for row in rows]
            prices = [self.prices.price(row.model, Usage(row.tokens, _expected_output(row))) for row in rows]
            known = [price for price in prices if price is not None]
            call = Call(rows, batch.id, sum(row.tokens for row in rows), sum(worst, Decimal(0)), rows[0].priority)
            price = sum(known, Decimal(0)) if len(known) == len(rows) else None
            yield Work(call, sum(map(_expected_output, rows)), price)

    def document(self) -> dict[str, Any]:
        for _, opened in self.packers.flush():
            self._open(opened)
        seconds, binding = self._duration()
        cached = self._cached()
        saved_usd = cached["saved_usd"]
        return {
            "rows": self.rows,
            "calls": self.calls,
            "batches": self.batches,
            "packing": packing_figures(
                self.packed,
                rows=self.rows,
                calls=self.calls,
                repeated=0,
                cost_usd=self.expected_usd - saved_usd,
                rpm=self.settings.rpm and self.settings.rpm * max(1, len(self.settings.base_urls)),
            ),
            "tokens": {"input": self.input_tokens, "output_max": self.most_output},
            "rows_counted_exactly": min(self.rows, _EXACT_ROWS),
            "rows_without_output_limit": self.unlimited,
            "cached": cached,
            "cost_usd": {
                "min": self.least_usd - saved_usd,
                "expected": self.expected_usd - saved_usd,
                "max": self.most_usd,
            },
            "cost_unknown_rows": sum(self.unpriced.values()),
            "models_without_price": sorted(self.unpriced),
            "duration_s": seconds,
            "binding": binding,
        }

    def _cached(self) -> dict[str, Any]:
        """Returns what a provider's cache is expected to serve of the input, and what that saves."""
        shared = self.prefixes.find()
        tokens, saved_usd = 0, Decimal(0)
        for model, size in shared.shared.items() if grouped(self.settings, shared) else ():
            cached = size * self.sizes[model][0] // self.sizes[model][1]
            tokens += cached
            full, low = (self.prices.price(model, Usage(_UNIT, 0, part)) for part in (0, _UNIT))
            if full is not None and low is not None:
                saved_usd += (full - low) * cached / _UNIT
        share = tokens / self.input_tokens if tokens else 0.0
        return {"share": share, "tokens": tokens, "groups": shared.groups if tokens else 0, "saved_usd": saved_usd}

    def _duration(self) -> tuple[float, str]:
        """Returns the longest of what each limit alone would take, and that limit's name."""
        settings = self.settings
        in_flight = settings.concurrency or settings.max_concurrency
        bounds = [
            (
                max(1, self.calls / in_flight) * _ASSUMED_LATENCY_S,
                f"{in_flight} in flight at {_ASSUMED_LATENCY_S:g} s each",
            )
        ]
        if settings.rpm is not None:
            bounds.append((self.calls / settings.rpm * 60, "requests per minute"))
        if settings.tpm is not None:
            bounds.append((self.input_tokens / settings.tpm * 60, "tokens per minute"))
        return max(bounds)


def _most_output(row: Row) -> int:
    return UNLIMITED_OUTPUT_TOKENS if row.max_output is None else row.max_output


def _expected_output(row: Row) -> int:
    return _ASSUMED_OUTPUT if row.max_output is None else min(_ASSUMED_OUTPUT, -(-row.max_output // _ASSUMED_SHARE))
