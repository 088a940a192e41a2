"""The report as a fold: operations in, counters out, in memory that does not grow with the number of rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from batchrun.records import (
    Doubted,
    Noted,
    Opened,
    Operation,
    Reopened,
    Returned,
    RunEnded,
    RunStarted,
    Sampled,
    Sent,
    Settled,
    Usage,
)
from batchrun.report.histogram import Histogram
from batchrun.report.packed import MONEY, Packed
from batchrun.report.timeline import Timeline

__all__ = ["ModelTally", "Tally"]

# What names a counter (a model, a code, a finish reason) comes from outside: beyond so many, one is shared.
_MAX_MODELS = 100
_MAX_FAULTS = 40
_MAX_NAMES = 40
_OTHER = "(other)"

_MAX_EXAMPLES = 3
_MAX_MESSAGE = 200
_MAX_NAME = 120
_MAX_IDS = 20
_MAX_NOTES = 200
_MAX_RUNS = 50

_NOTHING = Decimal(0)


class ModelTally:
    """What one model used and cost. Tokens and costs of failed sends are in here too, their rows are not."""

    __slots__ = (
        "actual_tokens",
        "cache_write",
        "cached",
        "cost_unknown_rows",
        "cost_usd",
        "estimated_rows",
        "estimated_tokens",
        "input",
        "output",
        "reasoning",
        "rows",
        "usage_unknown_rows",
    )

    def __init__(self) -> None:
        self.rows = 0
        """Succeeded."""
        self.input = 0
        self.output = 0
        self.cached = 0
        self.cache_write = 0
        self.reasoning = 0
        self.cost_usd = _NOTHING
        self.cost_unknown_rows = 0
        self.usage_unknown_rows = 0
        self.estimated_rows = 0
        """Succeeded rows with both an estimate and a usage: what the two sums below are over."""
        self.estimated_tokens = 0
        self.actual_tokens = 0

    def use(self, usage: Usage) -> None:
        """Adds one response's tokens."""
        self.input += usage.input_tokens
        self.output += usage.output_tokens
        self.cached += usage.cached_tokens
        self.cache_write += usage.cache_write_tokens
        self.reasoning += usage.reasoning_tokens


class Tally:
    """Implements ``records.Fold``. Counters are exact; examples, notes and runs are bounded lists.

    Where rows name more than 100 models (or servers more than 40 faults or finish reasons), those that come
    later are counted together as "(other)".
    """

    def __init__(self) -> None:
        self._fold: dict[type, Callable[[Any], None]] = {
            Opened: self._opened,
            Sent: self._sent,
            Returned: self._returned,
            Settled: self._settled,
            Reopened: self._reopened,
            Sampled: self._sampled,
            Noted: self._noted,
            Doubted: self._doubted,
            RunStarted: self._run_started,
            RunEnded: self._run_ended,
        }
        self._clear()

    def _clear(self) -> None:
        # rows
        self.succeeded = 0
        self.failed = 0
        self.failed_unsent = 0
        self.reopened = 0
        self.empty = 0
        self.failures: dict[str, dict[str, Any]] = {}
        """Kind → rows failed now, and examples."""
        self.finish_reasons: dict[str, int] = {}
        # sends
        self.sent = 0
        self.retried = 0
        self.refused = 0
        self.faults: dict[str, dict[str, Any]] = {}
        """Kind and code → sends that ended so, in all, and examples."""
        # money
        self.models: dict[str, ModelTally] = {}
        self.lost_usd = _NOTHING
        """Reservations that stay spent because a failed send may have been billed; doubts not included."""
        self.lost_sends = 0
        self.wasted_usd = _NOTHING
        """Known cost of sends that gave no answer."""
        self.wasted_sends = 0
        self.wasted_tokens = 0
        self.saved_usd = _NOTHING
        """What providers' caches took off the price of answers."""
        # doubts
        self.doubted = 0
        self.doubts_resent = 0
        self.doubted_usd = _NOTHING
        self.doubted_ids: list[str] = []
        # batches
        self.batches = 0
        self.batch_rows = 0
        self.batch_tokens = 0
        self.batch_bytes = 0
        self.budget_tokens = 0
        self.packed = Packed()
        # time
        self.answered = {name: Histogram() for name in ("queue", "service", "total")}
        self.unanswered = {name: Histogram() for name in ("queue", "service", "total")}
        """Of rows that failed after a send."""
        self.timeline = Timeline()
        self.note_counts: dict[str, int] = {}
        self.notes: deque[tuple[float, str, str]] = deque(maxlen=_MAX_NOTES)
        self.runs: list[dict[str, Any]] = []
        self.runs_started = 0
        self.ended_s = 0.0
        """Elapsed time of the runs that have ended."""
        self.run_at: float | None = None
        """When the run that has not ended yet began."""
        self.last_at = 0.0
        """The last moment known of a run; what the next run finds (doubts, reopened rows) moves it not."""

    def add(self, operation: Operation) -> None:
        """Takes one operation into account."""
        self._fold[type(operation)](operation)

    # ---------------------------------------------------------------- sends and rows

    def _opened(self, opened: Opened) -> None:
        self.batches += 1
        self.batch_rows += opened.rows
        self.batch_tokens += opened.tokens
        self.batch_bytes += opened.bytes
        self.budget_tokens += opened.budget_tokens
        self.packed.opened(opened)

    def _sent(self, sent: Sent) -> None:
        if sent.counts:
            self.sent += 1
            self.retried += sent.send > 1
        else:
            self.packed.rode_along(sent)
        self.last_at = max(self.last_at, sent.at)

    def _returned(self, returned: Returned) -> None:
        self._seen(returned.at)
        if returned.refused and returned.counts:
            self.refused += 1
        if returned.split and returned.counts:
            self.packed.split(returned)
        self._fault(returned.kind, returned.code, returned.status, returned.line, returned.detail)
        self._waste(returned.model, returned.usage, returned.cost_usd, returned.lost_usd)

    def _settled(self, settled: Settled) -> None:
        self.last_at = max(self.last_at, settled.at)
        if settled.status == "failed":
            self._settled_failed(settled)
            return
        self.succeeded += 1
        model = self.models.get(settled.model) or self._model(settled.model)
        model.rows += 1
        usage = settled.usage
        if usage is None:
            model.usage_unknown_rows += 1
        else:
            model.use(usage)
            if settled.estimated_tokens:
                model.estimated_rows += 1
                model.estimated_tokens += settled.estimated_tokens
                model.actual_tokens += usage.input_tokens
        if settled.cost_usd is None:
            model.cost_unknown_rows += 1
        else:
            model.cost_usd = MONEY.add(model.cost_usd, settled.cost_usd)
        if settled.lost_usd:
            self._lose(settled.lost_usd)
        if settled.saved_usd:
            self.saved_usd = MONEY.add(self.saved_usd, settled.saved_usd)
        if settled.empty:
            self.empty += 1
        _count(self.finish_reasons, settled.finish_reason or "(none)")
        answered = self.answered
        answered["queue"].add(settled.queue_s)
        answered["service"].add(settled.service_s)
        answered["total"].add(settled.total_s)

    def _settled_failed(self, settled: Settled) -> None:
        self.failed += 1
        kind = settled.kind or "unknown"
        failure = _entry(self.failures, kind, {"kind": kind})
        failure["count"] += 1
        _exemplify(failure, settled.line, settled.detail, custom_id=settled.custom_id, code=settled.code)
        if settled.unsent:
            self.failed_unsent += 1
            return
        self._fault(kind, settled.code, None, settled.line, settled.detail)
        self._waste(settled.model, settled.usage, settled.cost_usd, settled.lost_usd)
        unanswered = self.unanswered
        unanswered["queue"].add(settled.queue_s)
        unanswered["service"].add(settled.service_s)
        unanswered["total"].add(settled.total_s)

    def _reopened(self, reopened: Reopened) -> None:
        self.reopened += 1
        self.failed -= 1
        if reopened.unsent:
            self.failed_unsent -= 1
        kind = reopened.kind or "unknown"
        # Beyond the last name that has an entry of its own, a kind was counted under the common one.
        failure = self.failures.get(kind) or self.failures.get(_OTHER)
        if failure is None:
            return
        failure["count"] -= 1
        failure["examples"] = [example for example in failure["examples"] if example["line"] != reopened.line]
        if failure["count"] <= 0:
            del self.failures[failure["kind"]]

    def _doubted(self, doubted: Doubted) -> None:
        self.doubted += 1
        if doubted.resent:
            self.doubts_resent += 1
        self.doubted_usd = MONEY.add(self.doubted_usd, doubted.reserved_usd)
        if len(self.doubted_ids) < _MAX_IDS:
            self.doubted_ids.append(doubted.custom_id[:_MAX_NAME])

    def _fault(self, kind: str, code: str | None, status: int | None, line: int, detail: str | None) -> None:
        code = code and code[:_MAX_NAME]
        fault = _entry(self.faults, f"{kind} {code or status or ''}", {"kind": kind, "code": code, "status": status})
        fault["count"] += 1
        _exemplify(fault, line, detail)

    def _waste(self, name: str, usage: Usage | None, cost_usd: Decimal | None, lost_usd: Decimal) -> None:
        if usage is not None:
            self._model(name).use(usage)
            self.wasted_tokens += usage.input_tokens + usage.output_tokens
        if cost_usd:
            model = self._model(name)
            model.cost_usd = MONEY.add(model.cost_usd, cost_usd)
            self.wasted_usd = MONEY.add(self.wasted_usd, cost_usd)
            self.wasted_sends += 1
        if lost_usd:
            self._lose(lost_usd)

    def _lose(self, lost_usd: Decimal) -> None:
        self.lost_sends += 1
        self.lost_usd = MONEY.add(self.lost_usd, lost_usd)

    def _model(self, name: str) -> ModelTally:
        if name not in self.models:
            name = name[:_MAX_NAME]
            if len(self.models) >= _MAX_MODELS:
                name = _OTHER
        return self.models.setdefault(name, ModelTally())

    # ---------------------------------------------------------------- time

    def _seen(self, at: float) -> None:
        self.last_at = max(self.last_at, at)

    def _sampled(self, sampled: Sampled) -> None:
        self._seen(sampled.at)
        self.timeline.add(sampled)

    def _noted(self, noted: Noted) -> None:
        _count(self.note_counts, noted.what)
        self.notes.append((round(noted.at, 3), noted.what, noted.text[:_MAX_MESSAGE]))

    def _run_started(self, started: RunStarted) -> None:
        # A run that never said its end was killed: it lasted at least until the last thing known of it.
        self.ended_s += self.running_s()
        self.run_at = self.last_at = started.at
        self.runs_started += 1
        self.runs.append({"run": started.run, "started_at": started.at, "rows": started.rows, "state": None})
        if len(self.runs) > 1 + _MAX_RUNS:
            # The first and the last ones stay.
            del self.runs[1]
        self.timeline.start(started.at)

    def _run_ended(self, ended: RunEnded) -> None:
        self.run_at = None
        self.ended_s += ended.elapsed_s
        for run in reversed(self.runs):
            if run["run"] == ended.run:
                run.update(
                    state=ended.state,
                    reason=ended.reason[:_MAX_MESSAGE],
                    exit_code=ended.exit_code,
                    elapsed_s=ended.elapsed_s,
                )
                break

    def running_s(self) -> float:
        """Returns for how long the run that has not ended yet is known to have run; 0 where there is none."""
        return max(0.0, self.last_at - self.run_at) if self.run_at is not None else 0.0

    # ---------------------------------------------------------------- sums

    @property
    def elapsed_s(self) -> float:
        """Seconds that runs have taken, all together."""
        return self.ended_s + self.running_s()

    @property
    def asked(self) -> int:
        """Rows that were sent at least once; one made pending again counts again."""
        return self.sent - self.retried + self.packed.joined

    @property
    def cost_usd(self) -> Decimal:
        """What is known to have been paid, failed sends included."""
        return self._sum("cost_usd")

    @property
    def spent_usd(self) -> Decimal:
        """What counts as spent: the known cost, and every reservation whose send may have been billed."""
        return MONEY.add(MONEY.add(self.cost_usd, self.lost_usd), self.doubted_usd)

    @property
    def cost_unknown_rows(self) -> int:
        """Succeeded rows whose cost is unknown."""
        return sum(model.cost_unknown_rows for model in self.models.values())

    def _sum(self, name: str) -> Decimal:
        total = _NOTHING
        for model in self.models.values():
            total = MONEY.add(total, getattr(model, name))
        return total

    # ---------------------------------------------------------------- kept

    def dump(self) -> dict[str, Any]:
        """Returns the state as plain JSON types; money as strings."""
        state: dict[str, Any] = {name: getattr(self, name) for name in _PLAIN}
        state |= {name: str(getattr(self, name)) for name in _MONIES}
        state |= {name: getattr(self, name).copy() for name in _FLAT}
        state["failures"] = [_copied(entry) for entry in self.failures.values()]
        state["faults"] = [_copied(entry) for entry in self.faults.values()]
        state["fault_keys"] = list(self.faults)
        state["failure_keys"] = list(self.failures)
        state["models"] = {
            name: [str(model.cost_usd), *[getattr(model, field) for field in _MODEL_COUNTS]]
            for name, model in self.models.items()
        }
        state["answered"] = {name: histogram.dump() for name, histogram in self.answered.items()}
        state["unanswered"] = {name: histogram.dump() for name, histogram in self.unanswered.items()}
        state["packed"] = self.packed.dump()
        state["timeline"] = self.timeline.dump()
        state["notes"] = [list(note) for note in self.notes]
        state["runs"] = [run.copy() for run in self.runs]
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        """Replaces the state with what ``dump`` returned."""
        self._clear()
        for name in _PLAIN:
            setattr(self, name, state[name])
        for name in _MONIES:
            setattr(self, name, Decimal(state[name]))
        for name in _FLAT:
            setattr(self, name, state[name].copy())
        self.failures = dict(zip(state["failure_keys"], map(_copied, state["failures"]), strict=True))
        self.faults = dict(zip(state["fault_keys"], map(_copied, state["faults"]), strict=True))
        for name, (cost_usd, *counts) in state["models"].items():
            model = self.models[name] = ModelTally()
            model.cost_usd = Decimal(cost_usd)
            for field, count in zip(_MODEL_COUNTS, counts, strict=True):
                setattr(model, field, count)
        self.answered = {name: Histogram.load(kept) for name, kept in state["answered"].items()}
        self.unanswered = {name: Histogram.load(kept) for name, kept in state["unanswered"].items()}
        self.packed = Packed.load(state.get("packed", {}))  # a job of before it was counted
        self.timeline = Timeline.load(state["timeline"])
        self.notes.extend((at, what, text) for at, what, text in state["notes"])
        self.runs = [run.copy() for run in state["runs"]]


_PLAIN = (
    "succeeded",
    "failed",
    "failed_unsent",
    "reopened",
    "empty",
    "sent",
    "retried",
    "refused",
    "lost_sends",
    "wasted_sends",
    "wasted_tokens",
    "doubted",
    "doubts_resent",
    "batches",
    "batch_rows",
    "batch_tokens",
    "batch_bytes",
    "budget_tokens",
    "runs_started",
    "ended_s",
    "run_at",
    "last_at",
)
_MONIES = ("lost_usd", "wasted_usd", "doubted_usd", "saved_usd")
_FLAT = ("finish_reasons", "note_counts", "doubted_ids")
_MODEL_COUNTS = tuple(name for name in ModelTally.__slots__ if name != "cost_usd")


def _count(counts: dict[str, int], name: str) -> None:
    if name not in counts:
        name = name[:_MAX_NAME]
        if len(counts) >= _MAX_NAMES:
            name = _OTHER
    counts[name] = counts.get(name, 0) + 1


def _entry(entries: dict[str, dict[str, Any]], key: str, about: dict[str, Any]) -> dict[str, Any]:
    entry = entries.get(key)
    if entry is None:
        if len(entries) >= _MAX_FAULTS:
            key = _OTHER
            about = dict.fromkeys(about) | {"kind": _OTHER}
        entry = entries.setdefault(key, {**about, "count": 0, "examples": []})
    return entry


def _exemplify(entry: dict[str, Any], line: int, message: str | None, **about: str | None) -> None:
    examples = entry["examples"]
    if len(examples) < _MAX_EXAMPLES:
        cut = {name: value and value[:_MAX_NAME] for name, value in about.items()}
        examples.append({"line": line, **cut, "message": (message or "")[:_MAX_MESSAGE]})


def _copied(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {**entry, "examples": [example.copy() for example in entry["examples"]]}
