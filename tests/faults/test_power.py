"""Power cuts: what was shown as done before one is there after it, and no request was sent without a durable intent."""

from __future__ import annotations

import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from batchrun.report.tally import Tally
from batchrun.run.files import make_private_dir
from batchrun.run.store import Store
from tests.faults.machine import LONG, Ext4, build_shim, check_whole, in_memory, look
from tests.faults.server import FaultServer
from tests.support import Shell, prompts

SECTOR = 512

TRIES = 5 if LONG else 1
"""States that are tried of what a cut at one moment may leave."""

# ---------------------------------------------------------------- the kernel's own


@pytest.mark.parametrize("streamed", [False, True] if LONG else [False], ids=["file", "stream"][: 1 + LONG])
def test_power_cuts_lose_no_row_that_was_shown_as_done(shell: Shell, server: FaultServer, streamed: bool) -> None:
    cuts, rows, in_flight = (20, 2000, 8) if LONG else (3, 400, 8)
    dice = random.Random(41)
    server.delay_s = 0.004
    shell.write("in.jsonl", prompts(rows))
    shown_in_all = in_doubt = gone = 0
    raced: set[int] = set()
    with tempfile.TemporaryDirectory(dir=in_memory()) as memory, Ext4(Path(memory)) as disk:
        job = disk.at / "j"
        asked_for = ("--concurrency", str(in_flight), "--job", str(job))
        if streamed:  # read as it is sent, so that cuts come while lines are taken in
            asked_for += ("--flush-interval", "1", "--max-queue", "20")
        args = shell.submission(server, *asked_for, source="-" if streamed else "in.jsonl")
        rows_in = (shell.root / "in.jsonl").read_bytes()
        shown: dict[int, bytes] = {}
        for cut in range(cuts):
            already = len(server.requests)
            with (shell.root / "in.jsonl").open("rb") as stdin:
                process = shell.start(*args, stdin=stdin)
            server.wait_for_requests(already + dice.randrange(1, rows // cuts * 2 // 3))
            time.sleep(dice.random() * 0.03)
            unsynced = disk.at / f"unsynced-{cut}"
            unsynced.write_bytes(b"x" * 100_000)
            shown |= look(job).records
            asked = {int(request.text[1:]) for request in server.requests} - raced
            disk.cut_power()
            process.kill()
            shell.end(process)
            disk.restart()
            gone += not unsynced.exists() or unsynced.stat().st_size == 0
            after = look(job)
            assert shown.items() <= after.records.items(), "what was shown is gone"
            known = after.records.keys() | after.in_doubt | after.waiting
            assert asked <= known, "a send without a durable intent"
            # A sync that was under way when the kernel cut may have returned as if all were well.
            raced |= {int(request.text[1:]) for request in server.requests} - known
            assert len(after.in_doubt) <= in_flight
            shown_in_all, in_doubt = len(shown), in_doubt + len(after.in_doubt)
        assert gone > 0, "no cut lost what was not synced: they tell nothing"
        assert 0 < shown_in_all < rows
        done = shell.run(*args, data=rows_in).told(0)
        assert done.rows["succeeded"] == rows
        check_whole(shell, rows, str(job))
        assert shown.items() <= look(job).records.items()
    repeats = len(server.requests) - rows
    assert repeats <= in_doubt + len(raced)
    print(
        f"{cuts} power cuts: {shown_in_all} rows shown before them, 0 lost; {repeats} repeats, {in_doubt} in doubt,"
        f" {len(raced)} let go by a sync that the cut overtook"
    )


# ---------------------------------------------------------------- every state that a disk may be left in

DRIVER = """
import os, shutil, sys
from decimal import Decimal
from pathlib import Path
from batchrun.records import Sent
from batchrun.report.tally import Tally
from batchrun.run.store import Store
from tests.operations import settled

job, base, synchronous = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
store = Store(job, Tally())
store._write.execute(f"PRAGMA synchronous={synchronous}")
store._write.execute("PRAGMA wal_autocheckpoint=12")  # so that folding the log back happens in every third commit
shutil.copytree(job, base)
told = os.open(job / "told", os.O_WRONLY | os.O_CREAT)
for line in range(1, 41):
    for what, operation in (
        ("sent", Sent(line, 1, 0, Decimal("0.5"), 1.0, f"id-{line}")),
        ("done", settled(line, b"%d:" % line + b"r" * (line * 97 % 5000))),
    ):
        store.apply([operation])
        os.write(told, f"{what} {line}\\n".encode())  # the shim's log has it after all that made it durable
os.kill(os.getpid(), 9)
"""


@dataclass
class Disk:
    """The files of a directory as a disk may hold them: what was synced, and what was written since."""

    files: dict[str, bytes]
    pending: dict[str, list[tuple[int, bytes | None]]] = field(default_factory=dict)
    """Path → writes (offset, bytes) and cuts (size, None) since its last sync, in order."""

    def do(self, event: tuple[str, str, int, bytes]) -> None:
        """Takes the next event of the log."""
        kind, name, number, data = event
        if kind in "WT":
            self.pending.setdefault(name, []).append((number, data if kind == "W" else None))
        elif name in self.pending:
            self.files[name] = self.state(name, lambda: True)
            del self.pending[name]

    def state(self, name: str, kept) -> bytes:
        """Returns a file with those sectors of its pending writes, and those cuts, of which ``kept()`` says so."""
        data = bytearray(self.files.get(name, b""))
        for number, written in self.pending.get(name, []):
            if written is None:
                if kept():
                    del data[number:]
                    data.extend(bytes(number - len(data)))
                continue
            for at in range(0, len(written), SECTOR):
                if kept():
                    piece = written[at : at + SECTOR]
                    data.extend(bytes(max(0, number + at - len(data))))
                    data[number + at : number + at + len(piece)] = piece
        return bytes(data)

    def crash(self, dice: random.Random) -> Iterator[tuple[str, bytes]]:
        """Yields each file as a power cut now may leave it: unsynced sectors are there or not, in any combination."""
        share = dice.choice((0.0, 0.1, 0.5, 0.9, 1.0))
        for name in self.files.keys() | self.pending.keys():
            yield name, self.state(name, lambda: dice.random() < share)


def events(log: bytes, job: Path) -> Iterator[tuple[str, str, int, bytes]]:
    """Yields the shim's events on the files of a job: (kind, name, offset or size, bytes)."""
    at = 0
    while at < len(log):
        end = log.index(b"\n", at)
        kind, *words = log[at:end].decode().split(" ")
        at = end + 1
        if kind == "P":
            continue
        size = int(words[2]) if kind == "W" else 0
        data, at = log[at : at + size], at + size
        path = Path(words[0])
        if path.parent == job:
            yield kind, path.name, int(words[1]) if kind in "WT" else 0, data


def crashes(root: Path, shim: Path, synchronous: str, points: int) -> tuple[int, int]:
    """Commits 80 times, and looks at ``points`` states of the disk between; returns (states, states that lost)."""
    job, base, log = root / "job", root / "base", root / "log"
    make_private_dir(job)
    env = {"LD_PRELOAD": str(shim), "SHIM_UNDER": str(job), "SHIM_LOG": str(log), "SHIM_DATA": "1"}
    driver = subprocess.run(
        [sys.executable, "-c", DRIVER, str(job), str(base), synchronous],
        check=False,
        env=env | {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
    )
    assert driver.returncode == -9, driver.stderr
    history = list(events(log.read_bytes(), job))
    begin = next(index for index, event in enumerate(history) if event[1] == "told")
    kinds = {(kind, name) for kind, name, _, _ in history[begin:]}
    assert {("S", "state.db-wal"), ("W", "state.db")} <= kinds or synchronous == "OFF"
    disk = Disk({path.name: path.read_bytes() for path in base.iterdir() if not path.name.endswith("-shm")})
    for event in history[:begin]:  # the first commit's, which the copy does not have yet
        if event[1] in ("state.db", "state.db-wal"):
            disk.do(event)
    dice = random.Random(5)
    chosen = set(dice.sample(range(begin, len(history)), min(points, len(history) - begin)))
    told: list[str] = []
    lost = 0
    for index in range(begin, len(history)):
        event = history[index]
        if event[1] == "told":
            told.append(event[3].decode())
        else:
            disk.do(event)
        for _ in range(TRIES if index in chosen else 0):
            lost += not survives(root, disk, told, dice)
    return len(chosen) * TRIES, lost


def survives(root: Path, disk: Disk, told: list[str], dice: random.Random) -> bool:
    """Whether the store opens on a disk after a cut, whole, and knows all that it had told."""
    left = root / "left"
    shutil.rmtree(left, ignore_errors=True)
    make_private_dir(left)
    for name, data in disk.crash(dice):
        (left / name).write_bytes(data)
    tally = Tally()
    try:
        store = Store(left, tally)
    except Exception:  # noqa: BLE001 - whatever it is, the job is lost
        return False
    try:
        whole = store._write.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        settled = store.settled_in(1, 1000)
        known = settled | {intent.line for intent in store.intents(open_only=True)}
        done = {int(word.split()[1]) for word in told if word.startswith("done")}
        sent = {int(word.split()[1]) for word in told if word.startswith("sent")}
        return whole and done <= settled and sent <= known and tally.succeeded == len(settled)
    except sqlite3.DatabaseError:
        return False
    finally:
        store.close()


def test_whatever_a_power_cut_leaves_of_the_writes_that_were_not_synced_the_store_knows_all_that_it_told(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    shim = build_shim(tmp_path_factory.mktemp("shim"))
    with tempfile.TemporaryDirectory(dir=in_memory()) as root:
        states, lost = crashes(Path(root), shim, "FULL", 4000 if LONG else 150)
    assert lost == 0
    with tempfile.TemporaryDirectory(dir=in_memory()) as root:
        _, lost = crashes(Path(root), shim, "OFF", 20)
    assert lost > 0, "a store that syncs nothing must be caught"
    print(f"{states} crash states of the store's writes: 0 lost ({lost} of {20 * TRIES} without syncs)")
