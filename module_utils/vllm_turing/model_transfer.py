"""Fetch files over several connections, resumably, and let nothing wrong get its final name.

One pool of connections works on segments of all files, largest file first, so that a mirror which
throttles each connection is used to the full to the very end. Every segment's position is written
down four times a second: a kill, a reboot or a full disk costs a fraction of a second. A file is
hashed by its own thread while others are still coming, and gets its name only when size and
digest are those of the lock.

Failures are counted for the current source as a whole, not for each file: eight connections that
fail together are one failure of the source. A source that fails three times without a byte of
progress is left for the next one; what is there already stays, since parts are named by content.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import json
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .model_http import Answer, Source, TransferError, fetch, reason_of
from .model_lock import LockedFile, ModelError, mismatch, write_atomically

BUFFER = 1 << 18
#: Errors of the local disk: another source does not help.
LOCAL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM)
TRIES_PER_SOURCE = 3
ROUNDS = 3
WRONG_CONTENT_TRIES = 3
JOURNAL_EVERY = 0.25


class Stopped(Exception):
    """The run was asked to stop; what is there can be resumed."""


@dataclass(frozen=True)
class Settings:
    """How to fetch.

    :ivar connections: connections in all, over all files
    :ivar segment: bytes of one request
    :ivar timeout: seconds to connect, and to wait for each piece of data
    :ivar patience: seconds to bear a source that answers "too many requests" without progress
    :ivar bandwidth: bytes a second in all; 0 for no limit
    :ivar backoff: seconds of the first pause after a failure; doubled each round, at most 8
    """

    connections: int = 16
    segment: int = 32 << 20
    timeout: float = 20.0
    patience: float = 600.0
    bandwidth: int = 0
    backoff: float = 0.25


@dataclass(frozen=True)
class Progress:
    """How far a run is: bytes of all files, those there, and where they come from."""

    total: int
    done: int
    fetched: int
    files_left: int
    file: str
    source: str


@dataclass
class _File:
    """One file on its way."""

    path: str
    locked: LockedFile
    part: Path
    target: Path
    positions: dict[int, int] = field(default_factory=dict)
    active: set[int] = field(default_factory=set)
    url: str | None = None
    locate: threading.Lock = field(default_factory=threading.Lock)
    journalled: dict[str, int] = field(default_factory=dict)
    streaming: bool = False
    bad: int = 0
    fd: int = -1

    def end(self, start: int, segment: int) -> int:
        return min(start + segment, self.locked.size)

    @property
    def journal(self) -> Path:
        return self.part.with_suffix(".json")


class Limiter:
    """Spread bytes over time so that all connections together keep below a rate."""

    def __init__(self, rate: int) -> None:
        """Allow ``rate`` bytes a second; 0 for no limit."""
        self._rate = rate
        self._free_at = time.monotonic()
        self._lock = threading.Lock()

    def take(self, count: int) -> None:
        """Wait until ``count`` more bytes are due."""
        if not self._rate:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now - 0.5) + count / self._rate
            wait = self._free_at - now
        if wait > 0:
            time.sleep(wait)


class Transfer:
    """One run that brings the missing files of a revision into a folder."""

    def __init__(
        self,
        repo: str,
        commit: str,
        files: Mapping[str, LockedFile],
        folder: Path,
        sources: Sequence[Source],
        settings: Settings | None = None,
        *,
        token: str = "",
        log: Callable[[str], None] = print,
        report: Callable[[Progress], None] | None = None,
    ) -> None:
        """Prepare a run.

        :param files: what is wanted; a file already in ``folder`` is taken as right
        :param folder: where files get their names; parts live in ``.parts`` below it
        :param sources: in order of preference
        :param report: called about once a second
        """
        if not sources:
            raise ModelError("there is no source to fetch the model from", permanent=True)
        self.repo, self.commit, self.folder = repo, commit, folder
        self.sources = list(sources)
        self.settings = settings or Settings()
        self.token, self.log, self.report = token, log, report
        self.fetched = 0
        self.digests: dict[str, str] = {}
        self._parts = folder / ".parts"
        self._cv = threading.Condition()
        self._limiter = Limiter(self.settings.bandwidth)
        self._queue: collections.deque[tuple[_File, int]] = collections.deque()
        self._to_hash: queue.SimpleQueue[_File | None] = queue.SimpleQueue()
        self._files: list[_File] = []
        self._left = 0
        self._busy = 0
        self._limit = self.settings.connections
        self._good = 0
        self._generation = 0
        self._failures = 0
        self._rounds = 0
        self._pause_until = 0.0
        self._progress_at = time.monotonic()
        self._last_errors: dict[str, tuple[str, TransferError]] = {}
        self._stop = False
        self._fatal: Exception | None = None
        self._wanted = dict(files)
        self._total = sum(file.size for file in files.values())

    # -- run -------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Ask a running transfer to end soon; safe to call from a signal handler."""
        self._stop = True

    def run(self) -> None:
        """Fetch all that is missing.

        :raises ModelError: it cannot be done; what was fetched stays for the next run
        :raises Stopped: :meth:`stop` was called
        """
        self._plan()
        workers = [
            threading.Thread(target=self._work, daemon=True)
            for _ in range(self.settings.connections)
        ]
        hashers = [threading.Thread(target=self._hash, daemon=True) for _ in range(2)]
        for thread in workers + hashers:
            thread.start()
        journalled = told = ending = 0.0
        while any(thread.is_alive() for thread in workers):
            time.sleep(0.05)
            if self._stop:
                self._fail(Stopped())
            if self._fatal is not None:
                ending = ending or time.monotonic()
                if time.monotonic() - ending > 5.0:
                    break  # they wait for a silent server, and write nothing once they wake
            if time.monotonic() - journalled >= JOURNAL_EVERY:
                journalled = time.monotonic()
                self._save_journals()
            if time.monotonic() - told >= 1.0:
                told = time.monotonic()
                self._tell()
        for _ in hashers:
            self._to_hash.put(None)
        for thread in hashers:
            thread.join()
        self._save_journals()
        self._tell()
        if not any(thread.is_alive() for thread in workers):
            # Otherwise they stay open until the thread ends: a number must not be reused.
            for file in self._files:
                if file.fd >= 0:
                    os.close(file.fd)
        if self._fatal is not None:
            raise self._fatal
        self._clean()

    def _plan(self) -> None:
        """Open a part for every missing file and queue its missing segments."""
        self._parts.mkdir(parents=True, exist_ok=True)
        by_size = sorted(self._wanted.items(), key=lambda item: (-item[1].size, item[0]))
        for path, locked in by_size:
            target = self.folder / path
            if target.is_file():
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            # By path too: two files may have the same content, and each needs a part of its own.
            name = f"{locked.key}-{path.replace('/', '--')}"[:200]
            file = _File(path, locked, self._parts / f"{name}.part", target)
            try:
                file.fd = os.open(file.part, os.O_RDWR | os.O_CREAT, 0o644)
            except OSError as error:
                raise self._local(file, error) from error
            self._files.append(file)
            self._left += 1
            self._queue_segments(file, self._resume(file))

    def _resume(self, file: _File) -> dict[int, int]:
        """Return the positions that an earlier run reached in a part."""
        try:
            data = json.loads(file.journal.read_text(encoding="utf-8"))
            known = {int(start): int(position) for start, position in data["positions"].items()}
            size, segment = int(data["size"]), int(data["segment"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}
        if size != file.locked.size or segment != self.settings.segment:
            return {}
        have = os.fstat(file.fd).st_size
        return {
            start: position
            for start, position in known.items()
            if start % segment == 0 and start <= position <= min(file.end(start, segment), have)
        }

    def _queue_segments(self, file: _File, known: Mapping[int, int]) -> None:
        file.positions.clear()
        for start in range(0, file.locked.size, self.settings.segment):
            file.positions[start] = known.get(start, start)
            if file.positions[start] < file.end(start, self.settings.segment):
                self._queue.append((file, start))
        self._maybe_done(file)

    def _maybe_done(self, file: _File) -> None:
        """Hand a file that has all its bytes to the hashing threads."""
        if file.active or file.streaming:
            return
        segment = self.settings.segment
        if all(at == file.end(start, segment) for start, at in file.positions.items()):
            self._to_hash.put(file)

    # -- connections -----------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._cv:
                while not self._fatal and self._left and not self._may_start():
                    self._cv.wait(0.2)
                if self._fatal or not self._left:
                    return
                file, start = self._queue.popleft()
                if file.streaming or file.positions[start] >= file.end(
                    start, self.settings.segment
                ):
                    continue
                file.active.add(start)
                self._busy += 1
                generation = self._generation
            before = self.fetched
            error: Exception | None = None
            try:
                self._segment(file, start, generation)
            except (OSError, TransferError) as caught:
                error = caught
            except Exception as caught:
                self._fail(caught)
                error = caught
            with self._cv:
                self._busy -= 1
                file.active.discard(start)
                if self.fetched > before:
                    self._failures = self._rounds = 0
                    self._progress_at = time.monotonic()
                if error is None:
                    self._recover()
                else:
                    file.url = None
                    self._failed(file, error, generation)
                self._requeue(file, start)
                self._maybe_done(file)
                self._cv.notify_all()

    def _may_start(self) -> bool:
        return (
            bool(self._queue) and self._busy < self._limit and time.monotonic() >= self._pause_until
        )

    def _requeue(self, file: _File, start: int) -> None:
        if file.streaming:
            return
        if file.positions[start] < file.end(start, self.settings.segment):
            self._queue.appendleft((file, start))

    def _segment(self, file: _File, start: int, generation: int) -> None:
        """Fetch one segment from where it stands."""
        low = file.positions[start]
        end = file.end(start, self.settings.segment)
        source = self.sources[generation % len(self.sources)]
        with self._ask(file, source, low, end) as answer:
            self._check(file, source, answer, low, end)
            if answer.status == 206:
                self._copy(file, source, answer, start, low, end)
            else:
                self._stream(file, source, answer)

    def _ask(self, file: _File, source: Source, low: int, end: int) -> Answer:
        """Send the request, to the place the source redirected to before if that is known."""
        headers = {"Range": f"bytes={low}-{end - 1}"}
        timeout = self.settings.timeout
        known = file.url
        if known:
            return fetch(source, known, headers, self.token, timeout)
        with file.locate:
            if file.url:
                return fetch(source, file.url, headers, self.token, timeout)
            url = source.url(self.repo, self.commit, file.path)
            answer = fetch(source, url, headers, self.token, timeout)
            file.url = answer.url
            return answer

    def _check(self, file: _File, source: Source, answer: Answer, low: int, end: int) -> None:
        """Refuse an answer that cannot be the file, before a byte of it is used."""
        size = file.locked.size
        where = f"'{source.host}'"
        if answer.status == 206:
            said = answer.headers.get("Content-Range") or ""
            match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", said)
            if not match or int(match[1]) != low or int(match[3]) != size:
                raise TransferError(
                    "wrong",
                    f"{where} answers '{said}' when asked for bytes {low}-{end - 1} of {size}",
                )
            return
        kind = answer.headers.get("Content-Type") or ""
        if answer.length is not None and answer.length != size:
            if kind.startswith("text/html"):
                raise TransferError(
                    "wrong", f"{where} answers with a web page in place of the file (a login page?)"
                )
            raise TransferError(
                "wrong", f"{where} has a file of {answer.length} bytes where {size} are right"
            )

    def _copy(
        self, file: _File, source: Source, answer: Answer, start: int, low: int, end: int
    ) -> None:
        """Write a range to its place."""
        position = low
        for chunk in self._chunks(source, answer, end - low):
            self._write(file, chunk, position)
            position += len(chunk)
            file.positions[start] = position
        if position < end:
            raise TransferError("network", f"'{source.host}' ended the connection early")

    def _stream(self, file: _File, source: Source, answer: Answer) -> None:
        """Take a whole file from a server without ranges, on one connection."""
        segment = self.settings.segment
        with self._cv:
            if file.streaming:
                return
            file.streaming = True
        position = 0
        try:
            for chunk in self._chunks(source, answer, file.locked.size):
                self._write(file, chunk, position)
                position += len(chunk)
                for start in range((position - len(chunk)) // segment * segment, position, segment):
                    here = min(position, file.end(start, segment))
                    file.positions[start] = max(file.positions[start], here)
            if position < file.locked.size:
                raise TransferError("network", f"'{source.host}' ended the connection early")
            if answer.length is None and answer.body.read(1):
                raise TransferError("wrong", f"'{source.host}' sends more than the file's size")
        finally:
            with self._cv:
                file.streaming = False
                queued = {start for other, start in self._queue if other is file}
                for start, at in file.positions.items():
                    if start not in queued | file.active and at < file.end(start, segment):
                        self._queue.append((file, start))

    def _chunks(self, source: Source, answer: Answer, count: int) -> _Chunks:
        return _Chunks(self, source, answer, count)

    def _write(self, file: _File, chunk: memoryview, position: int) -> None:
        done = 0
        while done < len(chunk):
            done += os.pwrite(file.fd, chunk[done:], position + done)
        with self._cv:
            self.fetched += len(chunk)

    # -- failures --------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Allow one more connection after eight good segments in a row."""
        self._good += 1
        if self._good >= 8 and self._limit < self.settings.connections:
            self._limit += 1
            self._good = 0

    def _failed(self, file: _File, error: Exception, generation: int) -> None:
        if isinstance(error, OSError) and error.errno in LOCAL_ERRORS:
            self._fatal = self._fatal or self._local(file, error)
            return
        source = self.sources[generation % len(self.sources)]
        if not isinstance(error, TransferError):
            error = TransferError("network", f"'{source.host}' failed: {reason_of(error)}")
        self.log(f"{file.path}: {error}")
        if generation != self._generation:
            return
        self._good = 0
        self._last_errors[source.base] = (file.path, error)
        now = time.monotonic()
        if error.kind == "busy":
            self._limit = max(1, min(self._limit, self._busy))
            wait = error.retry_after
            if wait is None:
                wait = min(60.0, self.settings.backoff * 2 ** min(self._rounds, 10))
                self._rounds += self._busy == 0
            self._pause_until = max(self._pause_until, now + wait)
            if now - self._progress_at > self.settings.patience / (1 + (len(self.sources) > 1)):
                self._next_source(now, force=len(self.sources) == 1)
            return
        self._failures += 1
        if self._failures < TRIES_PER_SOURCE:
            wait = min(8.0, self.settings.backoff * 2**self._rounds)
            self._pause_until = max(self._pause_until, now + wait)
            return
        self._next_source(now)

    def _next_source(self, now: float, force: bool = False) -> None:
        self._generation += 1
        self._failures = 0
        self._rounds += 1
        self._limit = self.settings.connections
        for file in self._files:
            file.url = None
        if force or self._rounds > ROUNDS * len(self.sources):
            self._fatal = self._fatal or self._given_up()
            return
        wait = min(8.0, self.settings.backoff * 2**self._rounds)
        if len(self.sources) > 1:
            self.log(f"going on with '{self.sources[self._generation % len(self.sources)].host}'")
            if self._generation % len(self.sources):
                wait = 0.0
        self._progress_at = now
        self._pause_until = now + wait

    def _given_up(self) -> ModelError:
        errors = list(self._last_errors.values())
        permanent = all(error.kind in ("denied", "missing", "wrong") for _, error in errors)
        said = "; ".join(f"'{path}': {error}" for path, error in errors)
        if any(error.kind == "network" for _, error in errors):
            said += " (other sources: hf_model_sources, a proxy: hf_model_environment)"
        return ModelError(f"the model cannot be fetched: {said}", permanent=permanent)

    def _local(self, file: _File, error: OSError) -> ModelError:
        what = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return ModelError(
                f"the disk that holds '{self.folder}' is full: free some space and run again, "
                "what was fetched is kept"
            )
        return ModelError(f"'{file.part}' cannot be written: {what}")

    def _fail(self, error: Exception) -> None:
        with self._cv:
            self._fatal = self._fatal or error
            self._cv.notify_all()

    # -- verification ----------------------------------------------------------------------------

    def _hash(self) -> None:
        while True:
            file = self._to_hash.get()
            if file is None:
                return
            try:
                self._verify(file)
            except OSError as error:
                self._fail(self._local(file, error))

    def _verify(self, file: _File) -> None:
        os.ftruncate(file.fd, file.locked.size)
        problem = mismatch(file.part, file.locked)
        if not problem:
            os.fsync(file.fd)
        with self._cv:
            if problem:
                file.bad += 1
                source = self.sources[self._generation % len(self.sources)]
                self.log(f"{file.path} from '{source.host}' {problem}: fetching it again")
                if file.bad >= WRONG_CONTENT_TRIES:
                    hosts = ", ".join(f"'{source.host}'" for source in self.sources)
                    file.part.unlink(missing_ok=True)
                    file.journal.unlink(missing_ok=True)
                    self._fatal = self._fatal or ModelError(
                        f"'{file.path}' {problem}, {file.bad} times in a row from {hosts}: the "
                        "mirror serves wrong bytes or the lock is for another revision",
                        permanent=True,
                    )
                else:
                    self._generation += 1
                    file.url = None
                    self._queue_segments(file, {})
            else:
                os.close(file.fd)
                file.fd = -1
                file.part.replace(file.target)
                file.journal.unlink(missing_ok=True)
                self._left -= 1
            self._cv.notify_all()

    # -- memory ------------------------------------------------------------------------------------

    def _save_journals(self) -> None:
        """Write down how far every part is; a part that is ahead of its journal loses a little."""
        for file in self._files:
            with self._cv:
                if file.fd < 0 or not file.positions:
                    continue
                positions = {str(start): at for start, at in file.positions.items() if at > start}
            if positions == file.journalled:
                continue
            file.journalled = positions
            value = {
                "size": file.locked.size,
                "segment": self.settings.segment,
                "positions": positions,
            }
            try:
                with self._cv:
                    if file.fd >= 0:
                        # Not synced: what a power cut puts out of step, the digest finds.
                        write_atomically(file.journal, json.dumps(value), sync=False)
            except OSError as error:
                self._fail(self._local(file, error))

    def _tell(self) -> None:
        if self.report is None:
            return
        with self._cv:
            missing = sum(
                file.locked.size - sum(at - start for start, at in file.positions.items())
                for file in self._files
                if file.fd >= 0
            )
            source = self.sources[self._generation % len(self.sources)].host
            current = next((file.path for file in self._files if file.active), "")
            progress = Progress(
                self._total, self._total - missing, self.fetched, self._left, current, source
            )
        self.report(progress)

    def _clean(self) -> None:
        """Remove parts that no file of this revision needs."""
        with contextlib.suppress(OSError):
            for leftover in self._parts.iterdir():
                leftover.unlink()
            self._parts.rmdir()


class _Chunks:
    """The pieces of an answer's body, up to a number of bytes."""

    def __init__(self, transfer: Transfer, source: Source, answer: Answer, count: int) -> None:
        self._transfer = transfer
        self._source = source
        self._answer = answer
        self._left = count

    def __iter__(self) -> _Chunks:
        return self

    def __next__(self) -> memoryview:
        if not self._left:
            raise StopIteration
        if self._transfer._fatal is not None:
            raise TransferError("network", "the run is ending")
        want = min(self._left, BUFFER)
        self._transfer._limiter.take(want)
        try:
            # read1: what has arrived counts, even if the connection breaks before the rest.
            chunk = self._answer.body.read1(want)
        except Exception as error:
            raise TransferError(
                "network", f"'{self._source.host}' broke the connection: {reason_of(error)}"
            ) from error
        if not chunk:
            raise StopIteration
        if self._transfer._fatal is not None:
            raise TransferError("network", "the run is ending")
        self._left -= len(chunk)
        return memoryview(chunk)
