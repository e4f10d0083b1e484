"""The jobs of a service, in sqlite: what was accepted survives the process. One call at a time, on a local disk: WAL is not for NFS."""

import json
import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from peerlane.common.files import open_appendable
from peerlane.errors import PeerlaneError, UsageError
from peerlane.service.request import ENDED, JobDocument, JobRequest, State

FILE = "queue.sqlite"
MOST_TRIES = 3
_KEPT_S = 30 * 86_400.0  # finished jobs; their results stay in results.jsonl

_SCHEMA = """
pragma journal_mode = wal;
pragma synchronous = full;
create table if not exists job(
    key text primary key, body text not null, state text not null, priority integer not null, owner text not null, tries integer not null,
    submitted real not null, started real, finished real, result text, environment text, error text) without rowid;
create index if not exists queued on job(state, submitted);
create table if not exists submitter(key text, owner text, primary key(key, owner)) without rowid;
create table if not exists turn(owner text primary key, last real not null) without rowid;
create table if not exists penalty(owner text primary key, strikes integer not null, seconds real not null) without rowid;
"""
_NEXT = """
select job.key, body, owner, tries, submitted from job left join turn using(owner) left join penalty using(owner) where state = 'queued'
order by ifnull(turn.last, 0) + ifnull(penalty.seconds, 0), priority desc, submitted limit 1
"""
_ROOM_BYTES = 1 << 20
"""for a job and its result"""
_LOCKED_S = 1.0
"""to wait for another program that holds the file: the service answers nobody meanwhile"""
_FIRST_PENALTY_S, _LONGEST_PENALTY_S = 5.0, 300.0
"""by which a token's turn is later than those of others: after two candidates in a row that held up the node, and at most"""


class Taken(NamedTuple):
    """A job that is now to be judged."""

    key: str
    request: JobRequest
    tries: int
    submitted: float


@dataclass(frozen=True)
class Outcome:
    """The end of a try: a result and its environment as JSON, or an error that says nothing about the candidate."""

    result: str | None = None
    environment: str | None = None
    error: str | None = None
    again: bool = False
    """the machine failed: another try may succeed, or a later request for the same"""
    held_up: bool = False
    """the candidate held up the node, such as by a hang"""


class NotOwner(PeerlaneError):
    """A finished job of another token is not judged again."""


class JobQueue:
    """Jobs by content. Tokens take turns; among the jobs of one token the priority counts, then the order of arrival.

    Every method raises sqlite3.Error if the disk is full or fails; then it has changed nothing.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with open_appendable(folder / FILE):  # sqlite would follow a link
                pass
            self._db = sqlite3.connect(folder / FILE, isolation_level=None, timeout=_LOCKED_S, check_same_thread=False)
            self._db.executescript(_SCHEMA)
            self._recover()
        except (OSError, sqlite3.Error) as error:
            raise UsageError(
                f"the queue in {folder} cannot be opened: {error}; expected a folder on a local disk that can be written"
            ) from None

    def close(self) -> None:
        self._db.close()

    def _recover(self) -> None:
        """Queues jobs again that ran when the service was killed; those that were started too often have failed."""
        why = f"the service ended while this job ran, {MOST_TRIES} times"
        self._db.execute(
            "update job set state = 'failed', finished = ?, error = ? where state = 'running' and tries >= ?",
            (time.time(), why, MOST_TRIES),
        )
        self._db.execute("update job set state = 'queued' where state = 'running'")
        self._db.execute("delete from job where finished < ?", (time.time() - _KEPT_S,))
        self._db.execute("delete from submitter where key not in (select key from job)")

    # --- clients ---

    def get(self, key: str) -> JobDocument | None:
        """The job of this key."""
        row = self._db.execute(
            "select state, tries, submitted, started, finished, result, environment, error from job where key = ?", (key,)
        ).fetchone()
        if row is None:
            return None
        state, tries, submitted, started, finished, result, environment, error = row
        ahead = None
        if state == "queued":
            ahead = self._count("select count(*) from job where state = 'queued' and submitted < ?", submitted)
        return JobDocument(
            id=key,
            state=state,
            ahead=ahead,
            tries=tries,
            submitted=submitted,
            started=started,
            finished=finished,
            result=_json(result),
            environment=_json(environment),
            error=error,
        )

    def state(self, key: str) -> State | None:
        """The state alone."""
        row = self._db.execute("select state from job where key = ?", (key,)).fetchone()
        return None if row is None else row[0]

    def is_open(self, key: str) -> bool:
        """True if the job is queued or running, or done with a verdict: the same request again changes nothing."""
        row = self._db.execute("select state, error from job where key = ?", (key,)).fetchone()
        return row is not None and (row[0] in ("queued", "running") or (row[0] == "done" and row[1] is None))

    def add(self, key: str, request: JobRequest, owner: str) -> None:
        """Accepts a job; on the disk when this returns. One that ended without a verdict, or is to be judged again, begins anew.

        Raises NotOwner for a rerun of another token's job: only the token that owns a result may have it replaced. The owner is the token
        that asked first.
        """
        with self._db:
            self._db.execute("begin immediate")
            again = request.rerun and self.state(key) == "done" and self.is_open(key)
            if again and self.owner(key) != owner:
                raise NotOwner("this job belongs to another token: send the request without rerun, and get its result")
            self._db.execute("insert or ignore into submitter values(?, ?)", (key, owner))
            if self.is_open(key) and not again:
                return
            self._db.execute(
                "insert or replace into job(key, body, state, priority, owner, tries, submitted) values(?, ?, 'queued', ?, ?, 0, ?)",
                (key, request.model_dump_json(), request.priority, owner, time.time()),
            )

    def owner(self, key: str) -> str | None:
        """The token that asked for the job first."""
        row = self._db.execute("select owner from job where key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def cancel(self, key: str, owner: str) -> bool:
        """Takes back an owner's request. True if nobody else has asked for the job, and it had not ended: then it is cancelled."""
        with self._db:
            self._db.execute("begin immediate")
            self._db.execute("delete from submitter where key = ? and owner = ?", (key, owner))
            wanted = self._count("select count(*) from submitter where key = ?", key)
            if wanted or self.state(key) in (*ENDED, None):
                return False
            self._db.execute(
                "update job set state = 'cancelled', finished = ?, error = 'cancelled on request' where key = ?", (time.time(), key)
            )
            return True

    # --- the node ---

    def take(self) -> Taken | None:
        """The next job, which runs from now on; None if none is queued."""
        with self._db:
            self._db.execute("begin immediate")
            while True:
                if (row := self._db.execute(_NEXT).fetchone()) is None:
                    return None
                (key, body, owner, tries, submitted), now = row, time.time()
                try:
                    request = JobRequest.model_validate_json(body)
                    break
                except ValidationError:
                    why = "another version of peerlane accepted this job, and this one cannot read it: submit it again"
                    self._db.execute("update job set state = 'failed', finished = ?, error = ? where key = ?", (now, why, key))
            self._db.execute("update job set state = 'running', tries = tries + 1, started = ? where key = ?", (now, key))
            self._db.execute("insert or replace into turn values(?, ?)", (owner, now))
        return Taken(key, request, tries + 1, submitted)

    def finish(self, taken: Taken, outcome: Outcome) -> State:
        """Ends a try; the new state. A job that was cancelled in the meantime stays so."""
        again = outcome.again and taken.tries < MOST_TRIES
        state: State = "queued" if again else "done" if outcome.result is not None else "failed"
        with self._db:
            self._db.execute("begin immediate")
            self._db.execute(
                "update job set state = ?, finished = ?, result = ?, environment = ?, error = ? where key = ? and state = 'running'",
                (state, None if again else time.time(), outcome.result, outcome.environment, outcome.error, taken.key),
            )
            if state == "done" and not outcome.again:
                self._count_strike(taken.key, outcome.held_up)
        return self.state(taken.key) or state

    def _count_strike(self, key: str, held_up: bool) -> None:
        """The token of a job whose last candidates held up the node waits behind others, longer each time; one that did not ends that."""
        owner = self.owner(key)
        row = self._db.execute("select strikes from penalty where owner = ?", (owner,)).fetchone()
        strikes = (0 if row is None else row[0]) + 1 if held_up else 0
        seconds = 0.0 if strikes < 2 else min(_LONGEST_PENALTY_S, _FIRST_PENALTY_S * 2.0 ** min(strikes - 2, 10))
        self._db.execute("insert or replace into penalty values(?, ?, ?)", (owner, strikes, seconds))

    def release(self, taken: Taken) -> None:
        """Puts back a job that was interrupted by us; the try does not count."""
        self._db.execute("update job set state = 'queued', tries = tries - 1 where key = ? and state = 'running'", (taken.key,))

    def check_room(self) -> None:
        """Writes as much as a job and its result need, and deletes it again."""
        with self._db:
            self._db.execute("begin immediate")
            self._db.execute("insert or replace into turn values(zeroblob(?), 0)", (_ROOM_BYTES,))
        self._db.execute("delete from turn where typeof(owner) = 'blob'")

    # --- counts ---

    def queued(self, owner: str | None = None) -> int:
        """Jobs that wait, of one owner or of all."""
        if owner is None:
            return self._count("select count(*) from job where state = 'queued'")
        return self._count("select count(*) from job where state = 'queued' and owner = ?", owner)

    def counts(self) -> dict[str, int]:
        """Jobs by state."""
        return dict(self._db.execute("select state, count(*) from job group by state").fetchall())

    def _count(self, query: str, *values: Any) -> int:
        return int(self._db.execute(query, values).fetchone()[0])


def _json(text: str | None) -> Any:
    return None if text is None else json.loads(text)
