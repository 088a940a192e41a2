"""The shell around the schedule: intents before sends, outcomes before told, nothing after a failed commit."""

from __future__ import annotations

import asyncio
import io
import json
import random
import time
from collections.abc import Awaitable, Callable
from decimal import Decimal
from pathlib import Path

import anyio
import pytest

from batchrun.config import PriceOverride, Settings
from batchrun.errors import BatchrunError, Exit
from batchrun.intake.shapes import Shaper, Shaping
from batchrun.intake.tokens import Calibration, TokenCounter
from batchrun.plan.schedule import Flow, Schedule, Stop
from batchrun.providers.presets import make_provider, resolve
from batchrun.records import BadRow, Fault, HttpRequest, HttpResponse, Standing
from batchrun.report.prices import PriceBook
from batchrun.report.tally import Tally
from batchrun.run.batching import Batching, worst_price
from batchrun.run.engine import Counters, Engine
from batchrun.run.files import make_private_dir
from batchrun.run.source import Indexer, RowReader, scan
from batchrun.run.store import Store
from batchrun.run.view import View

SHAPER = Shaper(Shaping(model="m", max_tokens=10, max_tokens_name="max_tokens"))
KEY = "sk-sentinel-0123456789"


class Quiet:
    """A console that remembers what it was told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def notice(self, text: str) -> None:
        self.said.append(text)

    warn = debug = notice

    def start(self, total: int) -> None: ...

    def update(self, standing: Standing) -> None: ...

    def stop(self) -> None: ...

    def bad_lines(self, bad: list[BadRow], count: int) -> None: ...


def chat_reply(request: HttpRequest, text: str = "") -> HttpResponse:
    asked = json.loads(request.content)["messages"][-1]["content"]
    body = {
        "id": "x",
        "model": "m-1",
        "choices": [{"index": 0, "message": {"content": text or f"echo:{asked}"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 12, "completion_tokens": 3},
    }
    return HttpResponse(200, {"x-request-id": "req_1"}, json.dumps(body).encode())


class FakeClient:
    """Answers by a function, and remembers how many calls were out at once."""

    def __init__(self, answer: Callable[[HttpRequest, int], Awaitable[HttpResponse | Fault]]) -> None:
        self._answer = answer
        self.calls = 0
        self.out = 0
        self.most = 0
        self.most_tasks = 0

    async def send(self, request: HttpRequest, timeout_s: float) -> HttpResponse | Fault:
        self.calls += 1
        self.out += 1
        self.most = max(self.most, self.out)
        self.most_tasks = max(self.most_tasks, len(asyncio.all_tasks()))
        try:
            return await self._answer(request, self.calls)
        finally:
            self.out -= 1

    async def aclose(self) -> None: ...


class Bench:
    """A pinned job and an engine over it."""

    def __init__(self, folder: Path, rows: int, client: FakeClient, flow: Flow, grace_s: float = 5.0) -> None:
        self.job = folder / "j.batchrun"
        make_private_dir(self.job)
        self.tally = Tally()
        self.store = Store(self.job, self.tally)
        self.input = folder / "in.jsonl"
        data = b"\n".join(json.dumps({"id": f"r{n}", "prompt": f"p{n}"}).encode() for n in range(1, rows + 1))
        self.input.write_bytes(data)
        with self.store.transaction() as db:
            indexer = Indexer(None, lambda chunk: self.store.add_chunk(db, chunk))
            indexer.finish(scan(io.BytesIO(data), SHAPER, indexer.take).lines)
        self.console = Quiet()
        calibration = Calibration()
        prices = PriceBook(PriceOverride(Decimal(1), Decimal(2)))
        reader = RowReader(self.input, self.store, SHAPER, self.store.last_line())
        self.schedule = Schedule(
            flow,
            random.Random(1),
            time.monotonic(),
            worst_price(prices, calibration) if flow.budget_usd is not None else None,
        )
        self.engine = Engine(
            store=self.store,
            reader=reader,
            batches=iter(
                Batching(
                    reader,
                    [],
                    count=TokenCounter().estimate,
                    calibration=calibration,
                    settings=Settings(batch_tokens=10_000, batch_rows=50, batch_bytes=1 << 20),
                    packings={},
                )
            ),
            schedule=self.schedule,
            providers=[make_provider(resolve("openai", None), KEY)],
            client=client,
            prices=prices,
            calibration=calibration,
            counters=Counters(rows, 0, 0, 0, 0, 0, 0, Decimal(0), 0),
            console=self.console,
            timeout_s=30.0,
            grace_s=grace_s,
            budget_usd=flow.budget_usd,
            deadline_at=flow.deadline_at,
            secret=KEY,
        )

    def run(self) -> Stop | None:
        try:
            return anyio.run(self.engine.run)
        finally:
            self.store.stop()

    def results(self) -> list[dict[str, object]]:
        return [json.loads(record) for record in self.store.records("all")]


def test_every_row_is_answered_once_within_the_limit_and_with_no_more_tasks_than_calls(tmp_path: Path) -> None:
    async def answer(request: HttpRequest, n: int) -> HttpResponse:
        await asyncio.sleep(0.001)
        return chat_reply(request)

    client = FakeClient(answer)
    bench = Bench(tmp_path, 300, client, Flow(concurrency=7, total=300))
    assert bench.run() is None
    assert [result["output"] for result in bench.results()] == [f"echo:p{n}" for n in range(1, 301)]
    assert client.calls == bench.tally.sent == 300
    assert client.most == 7
    assert client.most_tasks <= 7 + 4  # the workers, the run itself, the feeder, the ticker


def test_an_intent_is_durable_before_its_request_leaves_and_gone_once_settled(tmp_path: Path) -> None:
    open_at_send: list[bool] = []

    async def answer(request: HttpRequest, n: int) -> HttpResponse:
        asked = json.loads(request.content)["messages"][-1]["content"]
        view = View(tmp_path / "j.batchrun")
        open_at_send.append(asked in {f"p{intent.line}" for intent in view.intents(open_only=True)})
        view.close()
        await asyncio.sleep(0)
        return chat_reply(request)

    bench = Bench(tmp_path, 60, FakeClient(answer), Flow(concurrency=5, total=60))
    assert bench.run() is None
    assert open_at_send == [True] * 60
    assert bench.store.intents() == []


def test_after_a_failed_commit_nothing_more_is_sent_and_what_was_in_flight_is_kept_if_it_can_be(
    tmp_path: Path,
) -> None:
    broken = asyncio.Event()
    sent_after: list[int] = []

    async def answer(request: HttpRequest, n: int) -> HttpResponse:
        if broken.is_set():
            sent_after.append(n)
        if n == 20:
            pages = bench.store._write.execute("PRAGMA page_count").fetchone()[0]
            bench.store._write.execute(f"PRAGMA max_page_count={pages}")
            broken.set()
            return chat_reply(request, "x" * 200_000)
        await asyncio.sleep(0.05 if n > 16 else 0)
        return chat_reply(request)

    client = FakeClient(answer)
    bench = Bench(tmp_path, 500, client, Flow(concurrency=4, total=500))
    with pytest.raises(BatchrunError, match="storage failed") as caught:
        bench.run()
    assert caught.value.exit_code == Exit.STORAGE
    assert len(sent_after) <= 4  # intents that were durable before the failure was known
    assert client.calls <= 24
    assert [result["line"] for result in bench.results()] == list(range(1, client.calls + 1))
    bench.store.close()


def test_a_failure_of_the_very_last_commit_is_told_too(tmp_path: Path) -> None:
    async def answer(request: HttpRequest, n: int) -> HttpResponse:
        if n < 5:
            return chat_reply(request)
        pages = bench.store._write.execute("PRAGMA page_count").fetchone()[0]
        bench.store._write.execute(f"PRAGMA max_page_count={pages}")
        return chat_reply(request, "x" * 200_000)

    bench = Bench(tmp_path, 5, FakeClient(answer), Flow(concurrency=1, total=5))
    with pytest.raises(BatchrunError, match="storage failed"):
        bench.run()
    bench.store.close()


def test_a_line_that_changes_under_a_run_stops_it_and_is_never_sent(tmp_path: Path) -> None:
    asked: list[str] = []

    async def answer(request: HttpRequest, n: int) -> HttpResponse:
        asked.append(json.loads(request.content)["messages"][-1]["content"])
        if n == 1:  # chunks of 1,024 lines are read ahead: change one far behind
            data = bench.input.read_bytes().replace(b'"p2900"', b'"X2900"')
            with bench.input.open("r+b") as file:
                file.write(data)
        await asyncio.sleep(0)
        return chat_reply(request)

    bench = Bench(tmp_path, 3_000, FakeClient(answer), Flow(concurrency=4, total=3_000))
    with pytest.raises(BatchrunError, match="line 2900 of the input has changed") as caught:
        bench.run()
    assert caught.value.exit_code == Exit.INPUT
    assert "X2900" not in asked
    assert bench.store.intents(open_only=True) == []


def test_what_does_not_land_within_the_grace_is_left_in_doubt(tmp_path: Path) -> None:
    async def answer(request: HttpRequest, n: int) -> HttpResponse:
        if n == 3:
            bench.schedule.drain(time.monotonic(), Stop("interrupted", Exit.SIGINT, "test"))
        await asyncio.sleep(60 if n <= 2 else 0.01)
        return chat_reply(request)

    bench = Bench(tmp_path, 50, FakeClient(answer), Flow(concurrency=3, total=50), grace_s=0.1)
    stop = bench.run()
    assert stop is not None
    assert stop.reason == "interrupted"
    assert not bench.engine.left_at_once
    assert [intent.custom_id for intent in bench.store.intents(open_only=True)] == ["r1", "r2"]
    assert [result["custom_id"] for result in bench.results()] == ["r3"]


def test_a_key_that_the_server_echoes_is_never_written(tmp_path: Path) -> None:
    async def answer(request: HttpRequest, n: int) -> HttpResponse:
        if n % 2:
            return HttpResponse(400, {}, json.dumps({"error": {"message": f"bad key {KEY}", "code": "x"}}).encode())
        return chat_reply(request, f"your key is {KEY}")

    bench = Bench(tmp_path, 10, FakeClient(answer), Flow(concurrency=1, total=10))
    bench.run()
    bench.store.close()
    written = b"".join(path.read_bytes() for path in bench.job.iterdir())
    assert KEY.encode() not in written
    assert written.count(b"your key is [redacted]") >= 5
    assert KEY not in json.dumps(bench.tally.dump())


def test_a_refusal_uses_up_no_attempt_and_its_row_is_answered_later(tmp_path: Path) -> None:
    refused: set[bytes] = set()

    async def answer(request: HttpRequest, n: int) -> HttpResponse:
        if request.content not in refused:
            refused.add(request.content)
            return HttpResponse(429, {"retry-after-ms": "1"}, b'{"error":{"message":"slow down"}}')
        return chat_reply(request)

    bench = Bench(tmp_path, 8, FakeClient(answer), Flow(concurrency=4, total=8, max_attempts=1))
    assert bench.run() is None
    assert {result["status"] for result in bench.results()} == {"succeeded"}
    assert {result["attempts"] for result in bench.results()} == {2}
    assert bench.tally.refused == 8


def test_spent_never_passes_the_budget_and_the_rest_stays_pending(tmp_path: Path) -> None:
    billed = 0

    async def answer(request: HttpRequest, n: int) -> HttpResponse | Fault:
        nonlocal billed
        billed += 12 * 1 + 3 * 2  # microdollars, as the prices have it
        await asyncio.sleep(0)
        if n % 5 == 0:
            return Fault("network", "lost after the request was sent", maybe_processed=True)
        return chat_reply(request)

    cap = Decimal("0.0015")
    bench = Bench(tmp_path, 500, FakeClient(answer), Flow(concurrency=50, total=500, budget_usd=cap))
    stop = bench.run()
    assert stop is not None
    assert (stop.reason, stop.exit_code) == ("budget", Exit.STOPPED)
    assert Decimal(billed) / 1_000_000 <= bench.tally.spent_usd <= cap
    assert bench.schedule.reserved_usd == 0
    assert bench.tally.succeeded > 20
