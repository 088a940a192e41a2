"""One run of a pinned job, from its doubts to its files."""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import sys
import time
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import anyio
import msgspec

from batchrun.config import Settings
from batchrun.errors import BatchrunError, Exit
from batchrun.intake.shapes import Shaper
from batchrun.intake.tokens import Calibration, TokenCounter
from batchrun.job.access import endpoints_for, packings_for, prices_for, provider_at
from batchrun.job.pinning import input_of
from batchrun.job.settings import to_json
from batchrun.job.standing import project, stand
from batchrun.plan.schedule import Flow, Schedule, Stop
from batchrun.providers.presets import Preset
from batchrun.records import Doubted, Operation, Reopened, RunEnded, RunStarted, Usage
from batchrun.report import metrics
from batchrun.report.tally import Tally
from batchrun.run import settle
from batchrun.run.batching import Batching, worst_price
from batchrun.run.engine import Counters, Engine
from batchrun.run.failpoint import reached
from batchrun.run.progress import Console
from batchrun.run.sim import SimTransport
from batchrun.run.source import RowReader, input_as_json
from batchrun.run.store import Store
from batchrun.run.stream import Stream
from batchrun.run.transport import Client, Http1Transport, fd_budget
from batchrun.run.view import View

__all__ = ["Outcome", "Run"]

_NO_ROWS = "the input has no rows: nothing to do"


class Outcome(msgspec.Struct, frozen=True):
    """How a command that runs a job ended."""

    exit_code: int
    summary: dict[str, Any]


class Run:
    """One run of a pinned job, from its doubts to its files."""

    def __init__(
        self,
        job: Path,
        store: Store,
        tally: Tally,
        preset: Preset,
        key: str | None,
        shaper: Shaper,
        settings: Settings,
        console: Console,
        started: float,
        stream: Stream | None,
    ) -> None:
        """``stream``: rows that arrive while it runs; None: the job has all of its rows."""
        self.stream = stream
        self.job = job
        self.store = store
        self.tally = tally
        self.preset = preset
        self.key = key
        self.settings = settings
        self.console = console
        self.started = started
        self.prices = prices_for(preset, settings)
        self._measure()
        self.left_at_once = False
        self.told_rpm: int | None = None
        by_prefix = settings.group_by != "none"
        self.reader = RowReader(input_of(job, store), store, shaper, self.last_line, by_prefix=by_prefix)

    def _measure(self) -> None:
        """Finds out how many rows the job has."""
        self.last_line = _limit_line(self.store, self.settings.limit)
        self.total = self.store.rows(self.last_line)

    def outcome(self) -> Outcome:
        """Runs what is pending and leaves results, errors and report behind."""
        try:
            return self._outcome()
        finally:
            self.reader.close()
            if self.stream is not None:
                self.stream.close()

    def _outcome(self) -> Outcome:
        if not self.total and self.stream is None:
            self.console.notice(_NO_ROWS)
        self._check_prices()
        if self.settings.group_by == "prefix" and not self.store.has_prefixes():
            self.console.notice("no rows are known to begin alike; that is looked for when an input is read first")
        self.store.put(settings=to_json(self.settings), last_line=self.last_line)
        if self.settings.retry_failed:
            self._reopen_failed()
        if self._pending() == 0 and self.stream is None:
            ended = self.store.get("ended")
            if ended is not None and self.total:
                self.console.notice(self._nothing_left())
            return self._finish(None, None, run=None)
        run = (self.store.get("runs") or 0) + 1
        self.store.put(runs=run, ended=None)
        reached("start")
        at = time.time()
        self.store.apply([RunStarted(run, at, self.total)])
        self._settle_doubts()
        stop: Stop | None = None
        error: BatchrunError | None = None
        if self._pending() or self.stream is not None:
            self.console.start(self.total)
            try:
                stop = self._engine_run()
            except BatchrunError as failure:
                error = failure
            finally:
                self.console.stop()
            self._settle_stream()
        return self._finish(stop, error, run=run)

    def _settle_stream(self) -> None:
        """Takes stock of what has arrived."""
        if self.stream is None:
            return
        self._measure()
        if found := self.stream.found.bad_count:
            self.console.bad_lines(self.stream.found.bad, found)
        if self.stream.ended and not self.total:
            self.console.notice(_NO_ROWS)

    def _pending(self) -> int:
        succeeded, failed = self.store.settled(self.last_line)
        return self.total - succeeded - failed

    def _nothing_left(self) -> str:
        whole = self.store.rows()
        if whole > self.total:
            return f"nothing left to do in the first {self.total:,} of {whole:,} rows (--limit)"
        return "nothing left to do"

    def _check_prices(self) -> None:
        """Refuses a budget that cannot be kept. Raises: BatchrunError(78) before anything is sent."""
        if self.settings.budget_usd is None:
            return
        for model in self.store.get("models"):
            if self.prices.worst(model, 1_000, 1_000) is None:
                raise BatchrunError(
                    f"--budget needs a price, and none is known for model `{model}`",
                    hint="give --price-in and --price-out (dollars per million tokens), or [prices] in batchrun.toml",
                    exit_code=Exit.CONFIGURATION,
                )

    def _reopen_failed(self) -> None:
        at = time.time()
        count = 0
        failed = self.store.failed_rows(self.last_line)
        while piece := list(itertools.islice(failed, 1_000)):
            reopened = [
                Reopened(line, kind, bool(is_unsent), at) for line, kind, is_unsent in piece if kind != "invalid"
            ]
            self.store.apply(reopened)
            count += len(reopened)
        self.console.notice(f"{count:,} failed rows are asked again")

    def _settle_doubts(self) -> None:
        """Names the rows whose send was under way when the last run died, and does with them as told."""
        doubts = self.store.intents(open_only=True)
        if not doubts:
            return
        at = time.time()
        resend = self.settings.on_doubt == "resend"
        operations: list[Operation] = []
        for intent in doubts:
            operations.append(Doubted(intent.line, intent.custom_id, intent.reserved_usd, resend, at))
            if not resend:
                operations.append(
                    settle.unsent(
                        intent.line,
                        intent.custom_id,
                        input_as_json(self.reader.line(intent.line)),
                        "in_doubt",
                        "the run died while this row was in flight; it may have been billed",
                        sends=intent.sends,
                        lost=Decimal(0),  # the doubt itself keeps the reservation
                        at=at,
                    )
                )
        reached("doubts")
        self.store.apply(operations)
        names = ", ".join(intent.custom_id for intent in doubts[:10])
        more = f" and {len(doubts) - 10:,} more" if len(doubts) > 10 else ""
        self.console.warn(
            f"{len(doubts):,} rows were in flight when the last run died: {names}{more}; "
            + ("sent again" if resend else "left failed")
            + " (counted as spent at their worst case)"
        )

    def _engine_run(self) -> Stop | None:
        settings, tally = self.settings, self.tally
        calibration = Calibration()
        if kept := self.store.get("calibration"):
            calibration.load(kept)
        counter = TokenCounter()
        packings = packings_for(self.preset, settings)
        # Counting costs as much as all the rest of a row: exactly only where a limit, a budget or a call needs it.
        exact = settings.budget_usd is not None or settings.tpm is not None or bool(packings)
        flow = self._flow()
        batches = Batching(
            self.reader,
            self.store.intents(),
            count=counter.count if exact else counter.estimate,
            calibration=calibration,
            settings=settings,
            packings=packings,
            arriving=None if self.stream is None else self.stream.queue,
        )
        for model in self.store.get("models") or [settings.model or ""]:
            self.prices.price(model, Usage(0, 0))  # loads the price list: not while replies are coming in
        worst = worst_price(self.prices, calibration) if settings.budget_usd is not None else None

        succeeded, failed = self.store.settled(self.last_line)

        async def run() -> Stop | None:
            schedule = Schedule(flow, random.Random(), time.monotonic(), worst)  # noqa: S311 - jitter
            engine = Engine(
                store=self.store,
                reader=self.reader,
                batches=iter(batches),
                schedule=schedule,
                providers=[provider_at(endpoint, self.key, packings) for endpoint in endpoints_for(settings)],
                client=self._client(flow.concurrency or flow.max_concurrency),
                prices=self.prices,
                calibration=calibration,
                counters=Counters(
                    total=self.total,
                    succeeded=succeeded,
                    failed=failed,
                    sent=tally.sent,
                    retried=tally.retried,
                    refused=tally.refused,
                    tokens=sum(model.input + model.output for model in tally.models.values()),
                    cost_usd=tally.cost_usd,
                    cost_unknown_rows=tally.cost_unknown_rows,
                ),
                console=self.console,
                timeout_s=settings.timeout_s,
                grace_s=settings.grace_s,
                budget_usd=settings.budget_usd,
                deadline_at=flow.deadline_at,
                secret=self.key,
                stream=self.stream,
            )
            try:
                return await engine.run()
            finally:
                self.left_at_once = engine.left_at_once
                self.told_rpm = schedule.told_rpm

        usual, usual_interval = gc.get_threshold(), sys.getswitchinterval()
        # Other threads (store, feeding, counting) need the interpreter for moments; at the usual 5 ms they would wait
        # longer than they work.
        sys.setswitchinterval(0.0003)
        gc.freeze()  # what was imported lives on: spare the collector walking it
        gc.set_threshold(20_000, 10, 10)  # rows come and go without cycles: looking for some took 8% of the loop
        try:
            stop = anyio.run(run, backend="asyncio", backend_options={"use_uvloop": True})
        finally:
            sys.setswitchinterval(usual_interval)
            gc.set_threshold(*usual)
            gc.unfreeze()
        self.store.put(calibration=calibration.dump(), told_rpm=self.told_rpm)
        return stop

    def _client(self, limit: int) -> Client:
        """Returns how requests travel: to nobody, directly, or through the proxy that was asked for."""
        if self.preset.name == "sim":
            return Client(SimTransport(self.settings.sim))
        if self.settings.proxy_env:
            from batchrun.run.proxied import EnvironmentTransport

            urls = [endpoint.base_url for endpoint in endpoints_for(self.settings)]
            transport = EnvironmentTransport(urls, allow_http=self.settings.allow_http, limit=limit)
            if at := ", ".join(dict.fromkeys(transport.proxies)):
                self.console.notice(f"by way of the proxy {at}: slower than directly with many requests in flight")
            else:
                self.console.notice("--proxy-env: no proxy of the environment is for this address; going directly")
            return Client(transport)
        return Client(Http1Transport(limit=limit))

    def _flow(self) -> Flow:

        settings = self.settings
        wanted = settings.concurrency or settings.max_concurrency
        allowed = wanted if self.preset.name == "sim" else fd_budget(wanted)
        if allowed < wanted:
            self.console.warn(f"at most {allowed} requests in flight: the limit on open files allows no more")
        failures = settings.max_failures
        share = failures is not None and failures.endswith("%")
        return Flow(
            max_concurrency=min(settings.max_concurrency, allowed),
            concurrency=None if settings.concurrency is None else allowed,
            rpm=settings.rpm,
            tpm=settings.tpm,
            max_attempts=settings.max_attempts,
            patience_s=settings.patience_s,
            deadline_at=None if settings.deadline_s is None else self.started + settings.deadline_s,
            budget_usd=settings.budget_usd,
            spent_usd=self.tally.spent_usd,
            max_failures=int(failures) if failures is not None and not share else None,
            failed=self.tally.failed,
            max_failure_share=float(failures[:-1]) / 100 if failures is not None and share else None,
            total=self.total,
            counts_max_tokens=self.preset.counts_max_tokens,
            origins=max(1, len(settings.base_urls)),
        )

    # ------------------------------------------------------------ the end

    def _finish(self, stop: Stop | None, error: BatchrunError | None, *, run: int | None) -> Outcome:
        doubts = self.store.intents(open_only=True)
        state, reason, exit_code = self._ending(stop, error)
        if run is not None:
            ended = {"state": state, "reason": reason, "exit_code": int(exit_code)}
            with contextlib.suppress(BatchrunError) if error is not None else contextlib.nullcontext():
                elapsed = time.monotonic() - self.started
                self.store.apply([RunEnded(run, time.time(), elapsed, state, reason, int(exit_code))])
                reached("end")
                self.store.put(ended=ended)
        else:
            self.store.put(ended={"state": state, "reason": reason, "exit_code": int(exit_code)})
        standing = stand(self.job, self.store, state, reason, int(exit_code), doubts)
        if not self.left_at_once:
            with contextlib.suppress(OSError) if error is not None else contextlib.nullcontext():
                project(self.job, self.store, self.tally, standing)
        if error is not None and error.exit_code != Exit.STORAGE:
            self.console.warn(error.message)
            if self.stream is not None and error.hint:
                self.console.notice(f"hint: {error.hint}")
        return Outcome(int(exit_code), metrics.summary(self.tally, standing))

    def _ending(
        self, stop: Stop | None, error: BatchrunError | None
    ) -> tuple[Literal["complete", "stopped", "interrupted", "failed"], str, Exit]:
        if error is not None:
            return "failed", error.message, error.exit_code
        whole = self.stream is None or self.stream.ended
        if stop is None or (self._pending() == 0 and whole and stop.reason != "max-failures"):
            failed = self.store.settled(self.last_line)[1]
            return (
                "complete",
                f"{failed:,} rows failed" if failed else "",
                Exit.ROWS_FAILED if failed else Exit.OK,
            )
        reason = f"{stop.reason}: {stop.detail}" if stop.detail else stop.reason
        if stop.reason == "interrupted":
            return "interrupted", reason, stop.exit_code
        return "stopped" if stop.exit_code == Exit.STOPPED else "failed", reason, stop.exit_code


def _limit_line(view: View, limit: int | None) -> int:
    """Returns the line that ends the job for now: the last one, or that of the ``limit``-th row."""
    if limit is None:
        return view.last_line()
    left = limit
    for chunk in view.chunks():
        if left > chunk.rows:
            left -= chunk.rows
            continue
        classes = chunk.entries[4::13]
        for index, kind in enumerate(classes):
            left -= kind != 0
            if left == 0:
                return chunk.first_line + index
    return view.last_line()
