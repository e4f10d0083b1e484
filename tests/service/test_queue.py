"""What the queue promises: jobs by content, turns of tokens, nothing lost."""

import sqlite3
from pathlib import Path

import pytest

from peerlane.errors import UsageError
from peerlane.service.queue import FILE, MOST_TRIES, JobQueue, NotOwner, Outcome
from peerlane.service.request import JobRequest
from peerlane.service.server import exclusive
from peerlane.service.settings import read_tokens


def ask(queue: JobQueue, key: str, owner: str = "one", **fields: int) -> None:
    queue.add(key, JobRequest(problem=1, source=f"# {key}", **fields), owner)


def order(queue: JobQueue) -> list[str]:
    found = []
    while (taken := queue.take()) is not None:
        queue.finish(taken, Outcome(result="{}"))
        found.append(taken.key)
    return found


def test_tokens_take_turns_and_priority_orders_the_jobs_of_one(tmp_path: Path) -> None:
    queue = JobQueue(tmp_path)
    for key in ("a1", "a2", "a3"):
        ask(queue, key)
    ask(queue, "a4", priority=5)
    ask(queue, "b1", "two", priority=-5)
    ask(queue, "b2", "two")
    assert order(queue) in (["a4", "b2", "a1", "b1", "a2", "a3"], ["b2", "a4", "b1", "a1", "a2", "a3"])


def test_what_was_running_is_queued_again_but_not_for_ever(tmp_path: Path) -> None:
    """As after SIGKILL: the queue is opened again without having been closed."""
    ask(JobQueue(tmp_path), "a")
    for tries in range(1, MOST_TRIES + 1):
        taken = JobQueue(tmp_path).take()
        assert taken is not None and taken.tries == tries
    queue = JobQueue(tmp_path)
    job = queue.get("a")
    assert queue.take() is None and job is not None
    assert job.state == "failed" and f"{MOST_TRIES} times" in str(job.error)
    ask(queue, "a")
    assert queue.state("a") == "queued", "it was told, and may be asked for again"


def test_a_job_that_this_version_cannot_read_fails_alone(tmp_path: Path) -> None:
    queue = JobQueue(tmp_path)
    ask(queue, "old")
    with sqlite3.connect(tmp_path / FILE) as database:
        database.execute("""update job set body = '{"problem": 1, "source": "x", "colour": "red"}'""")
    ask(queue, "new")
    assert order(queue) == ["new"]
    job = queue.get("old")
    assert job is not None and job.state == "failed" and "submit it again" in str(job.error)


def test_files_of_the_service_are_no_links(tmp_path: Path) -> None:
    mine = tmp_path / "mine.sqlite"
    (tmp_path / FILE).symlink_to(mine)
    (tmp_path / "serve.lock").symlink_to(mine)
    with pytest.raises(UsageError, match=r"queue\.sqlite is a link"):
        JobQueue(tmp_path)
    with pytest.raises(UsageError, match=r"serve\.lock is a link"), exclusive(tmp_path, []):
        pass
    assert not mine.exists()


def test_a_job_that_two_tokens_want_is_cancelled_by_both(tmp_path: Path) -> None:
    queue = JobQueue(tmp_path)
    ask(queue, "a", "one")
    ask(queue, "a", "two")
    assert not queue.cancel("a", "one") and queue.state("a") == "queued"
    taken = queue.take()
    assert taken is not None and queue.cancel("a", "two") and queue.state("a") == "cancelled"
    queue.release(taken)
    assert queue.finish(taken, Outcome(result="{}")) == "cancelled", "what comes late changes nothing"


def test_a_fault_of_the_machine_is_tried_again_and_then_told(tmp_path: Path) -> None:
    queue = JobQueue(tmp_path)
    ask(queue, "a")
    for left in range(MOST_TRIES - 1, -1, -1):
        taken = queue.take()
        assert taken is not None
        assert queue.finish(taken, Outcome(error="no ranks", again=True)) == ("queued" if left else "failed")


def test_a_rerun_begins_anew_and_a_repetition_does_not(tmp_path: Path) -> None:
    queue = JobQueue(tmp_path)
    ask(queue, "a")
    assert order(queue) == ["a"]
    ask(queue, "a")
    assert queue.state("a") == "done"
    ask(queue, "a", rerun=True)
    assert queue.state("a") == "queued"


def test_tokens_are_read_from_private_files_alone(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("# ours\ntrainer 0123456789abcdef\nfedcba9876543210\n")
    file.chmod(0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        read_tokens(None, file)
    file.chmod(0o600)
    tokens = read_tokens("an-environments-token", file)
    assert tokens.owner("Bearer 0123456789abcdef") == "trainer" and tokens.owner("Bearer fedcba9876543210") == "line3"
    assert (
        tokens.owner("Bearer an-environments-token") == "default" and tokens.owner("Bearer nonsense") is None and tokens.owner("") is None
    )
    with pytest.raises(UsageError, match="expected at least 16"):
        read_tokens("short", None)
    file.write_text("one 0123456789abcdef\ntwo 0123456789abcdef\n")
    with pytest.raises(UsageError, match="same secret"):
        read_tokens(None, file)


def test_a_rerun_needs_the_token_that_owns_the_job(tmp_path: Path) -> None:
    """Whoever can guess a request could else put a finished job of others back to waiting, again and again."""
    queue = JobQueue(tmp_path)
    ask(queue, "a", "one")
    assert order(queue) == ["a"]
    for _ in range(2):  # that the other has asked for the same does not make it the owner
        with pytest.raises(NotOwner):
            ask(queue, "a", "two", rerun=True)
        assert queue.state("a") == "done"
        ask(queue, "a", "two")
    ask(queue, "a", "one", rerun=True)
    assert queue.state("a") == "queued"
    ask(queue, "a", "two", rerun=True)
    assert order(queue) == ["a"], "a result that is still to come serves both"
    with pytest.raises(NotOwner):
        ask(queue, "a", "two", rerun=True)


def test_a_token_whose_candidates_hang_waits_behind_others(tmp_path: Path) -> None:
    queue = JobQueue(tmp_path)
    for number in range(6):
        ask(queue, f"a{number}")
    for _ in range(2):
        taken = queue.take()
        assert taken is not None and taken.key.startswith("a")
        queue.finish(taken, Outcome(result="{}", held_up=True))
    for number in range(4):
        ask(queue, f"b{number}", "two")
    first, *rest = order(queue)
    assert [first, *rest[:3]] == ["b0", "b1", "b2", "b3"], "not in turn with them"
    assert rest[3:] == ["a2", "a3", "a4", "a5"], "but judged in the end"


def test_one_hang_costs_a_token_nothing(tmp_path: Path) -> None:
    queue = JobQueue(tmp_path)
    for number in range(3):
        ask(queue, f"a{number}")
    taken = queue.take()
    assert taken is not None
    queue.finish(taken, Outcome(result="{}", held_up=True))
    ask(queue, "b0", "two")
    ask(queue, "b1", "two")
    assert order(queue) == ["b0", "a1", "b1", "a2"]
