"""Bring a model to this host: the program behind ``vllm-turing-model.service``.

List (once), adopt what is already here, fetch the rest, verify, promote. Each step leaves something
that the next run goes on from, so it may be killed at any moment. Progress is one small file.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from . import model_listing, model_manifest
from .model_http import Source, parse_source
from .model_lock import Lock, LockedFile, ModelError, file_digests, mismatch
from .model_manifest import Stamp
from .model_safetensors import Finding, inspect_folder
from .model_store import Config, Status, Store, free_bytes, sync_folder
from .model_transfer import Progress, Settings, Stopped, Transfer

#: What systemd is told not to try again (sysexits.h: EX_CONFIG).
EXIT_PERMANENT = 78
EXIT_LATER = 75


@dataclass(frozen=True)
class Outcome:
    """What a run did."""

    changed: bool
    folder: Path
    lock: Lock
    fetched: int
    findings: tuple[Finding, ...] = ()


class Fetch:
    """One run of the program."""

    def __init__(self, config: Config, settings: Settings | None = None) -> None:
        """Prepare a run.

        :param settings: how to transfer; from the configuration when left out
        """
        self.config = config
        self.store = Store(config)
        self.settings = settings or Settings(
            connections=config.connections,
            bandwidth=int(config.bandwidth * (1 << 20)),
            patience=config.patience,
        )
        self._transfer: Transfer | None = None
        self._stop = False
        self._status = Status("listing", repo=config.repo)
        self._recent: deque[tuple[float, int]] = deque(maxlen=15)

    def stop(self) -> None:
        """End soon, keeping what is there."""
        self._stop = True
        if self._transfer is not None:
            self._transfer.stop()

    def run(self) -> Outcome:
        """Do what is missing.

        :raises ModelError: it cannot be done
        :raises Stopped: :meth:`stop` was called
        """
        sources, folders = self._sources()
        lock = self.store.lock()
        if lock is None:
            self._tell(state="listing")
            lock = self._make_lock(sources)
            self.store.save_lock(lock)
            self._say(
                f"no lock was given: '{lock.repo}' is now held to commit {lock.commit} "
                f"('{self.store.host_lock}')"
            )
        self._tell(commit=lock.commit, total=lock.size)
        if self.store.complete(lock):
            self._tell(state="complete", done=lock.size)
            folder = self.store.current()
            assert folder is not None
            return Outcome(False, folder, lock, 0)
        return self._bring(lock, sources, folders)

    # -- steps -----------------------------------------------------------------------------------

    def _bring(self, lock: Lock, sources: list[Source], folders: list[Path]) -> Outcome:
        in_place = self._verify_in_place(lock)
        if in_place is not None:
            return in_place
        ready = self.store.ready_revision(lock)
        if ready is not None:
            self.store.check_link()
            self.store.point_to(ready)
            self._tell(state="complete", done=lock.size)
            return Outcome(True, ready, lock, 0)
        self.store.drop_other_staging(lock)
        staging = self.store.staging(lock)
        staging.mkdir(parents=True, exist_ok=True)
        self._drop_strays(staging, lock)
        self._adopt(lock, staging, folders)
        missing = {
            path: file for path, file in lock.files.items() if not (staging / path).is_file()
        }
        fetched = 0
        if missing:
            self._check_space(staging, missing)
            transfer = Transfer(
                lock.repo,
                lock.commit,
                lock.files,
                staging,
                sources,
                self.settings,
                token=model_listing.read_token(self.config.token_file),
                log=self._say,
                report=self._progress,
            )
            self._transfer = transfer
            if self._stop:
                raise Stopped
            self._tell(state="fetching")
            try:
                transfer.run()
            finally:
                fetched = transfer.fetched
        self._tell(state="verifying", done=lock.size)
        stamps = self._stamp(staging, lock)
        full_lock = lock.with_digests({path: stamp.sha256 for path, stamp in stamps.items()})
        findings = self._inspect(staging, full_lock)
        if full_lock != lock and not self.config.lock:
            self.store.save_lock(full_lock)
        for folder in {file.parent for file in (staging / path for path in lock.files)}:
            sync_folder(folder)
        folder = self.store.promote(full_lock, stamps)
        for removed in self.store.prune():
            self._say(f"removed the earlier revision '{removed}'")
        self._tell(state="complete", done=lock.size)
        return Outcome(True, folder, full_lock, fetched, tuple(findings))

    def _sources(self) -> tuple[list[Source], list[Path]]:
        """Split the sources into those asked over the network and folders of this host."""
        remote = [parse_source(text) for text in self.config.sources if not text.startswith("/")]
        folders = [Path(text) for text in (*self.config.sources, *self.config.adopt)]
        return remote, [path for path in folders if str(path).startswith("/")]

    def _make_lock(self, sources: list[Source]) -> Lock:
        """Ask the Hubs in order; the first that answers decides.

        :raises ModelError: none answers, or there is none
        """
        hubs = [source for source in sources if not source.plain]
        if not hubs:
            raise ModelError(
                "a web folder or a local one cannot say which files are right: give a lock "
                "(hf_model_lock) or a Hub in hf_model_sources",
                permanent=True,
            )
        errors: list[ModelError] = []
        for hub in hubs:
            try:
                return model_listing.list_revision(
                    self.config.tools_python or sys.executable,
                    hub.base,
                    self.config.repo,
                    self.config.revision,
                    token_file=str(model_listing.token_path(self.config.token_file) or ""),
                    home=str(self.store.root / ".status" / "hub-client"),
                )
            except ModelError as error:
                self._say(str(error))
                errors.append(error)
        raise ModelError(
            "; ".join(str(error) for error in errors),
            permanent=all(error.permanent for error in errors),
        )

    def _verify_in_place(self, lock: Lock) -> Outcome | None:
        """Read again what the manifest does not vouch for; done when all of it is right."""
        folder = self.store.current()
        if folder is None or any(not (folder / path).is_file() for path in lock.files):
            return None
        manifest = self.store.manifest_file(folder)
        stamps = model_manifest.load(manifest)
        doubtful = model_manifest.unverified(folder, lock.files, stamps)
        self._tell(state="verifying", message=f"reading {len(doubtful)} files again")
        for path in doubtful:
            problem = mismatch(folder / path, lock.files[path])
            if problem:
                self._say(f"'{folder / path}' {problem}")
                return None
        stamps = self._stamp(folder, lock, stamps)
        full_lock = lock.with_digests({path: stamp.sha256 for path, stamp in stamps.items()})
        findings = self._inspect(folder, full_lock)
        if full_lock != lock and not self.config.lock:
            self.store.save_lock(full_lock)
        model_manifest.save(manifest, stamps)
        self._tell(state="complete", done=lock.size, message="")
        return Outcome(False, folder, full_lock, 0, tuple(findings))

    def _drop_strays(self, staging: Path, lock: Lock) -> None:
        """Remove from staging what an earlier lock of the same commit had and this one has not."""
        for file in sorted(staging.rglob("*"), reverse=True):
            path = file.relative_to(staging)
            if path.parts[0] == ".parts" or file.is_dir():
                continue
            if path.as_posix() not in lock.files or mismatch(file, lock.files[path.as_posix()]):
                file.unlink()

    def _adopt(self, lock: Lock, staging: Path, folders: list[Path]) -> None:
        """Take files that are already on this host over, by content."""
        places = [*folders]
        current = self.store.current()
        if current is not None:
            places.insert(0, current)
        if self.store.revisions.is_dir():
            places += [path for path in sorted(self.store.revisions.iterdir()) if path.is_dir()]
        taken = 0
        for path, locked in lock.files.items():
            if self._stop:
                raise Stopped
            target = staging / path
            if target.is_file():
                continue
            for place in dict.fromkeys(places):
                candidate = place / path
                try:
                    if not candidate.is_file() or candidate.stat().st_size != locked.size:
                        continue
                    self._tell(state="adopting", file=path)
                    if mismatch(candidate, locked):
                        continue
                    target.parent.mkdir(parents=True, exist_ok=True)
                    self._take(candidate, target, ours=place.parent == self.store.revisions)
                except OSError as error:
                    self._say(f"'{candidate}' cannot be taken over: {error.strerror}")
                    continue
                taken += locked.size
                break
        if taken:
            self._say(f"took {taken} bytes over from this host's disk")

    def _take(self, candidate: Path, target: Path, *, ours: bool) -> None:
        """Link a file of our own store, copy one of somebody else's (who may write to it)."""
        draft = target.with_name(f".{target.name}.part")
        draft.unlink(missing_ok=True)
        if ours:
            try:
                os.link(candidate.resolve(), draft)
                draft.replace(target)
                return
            except OSError:
                draft.unlink(missing_ok=True)
        if free_bytes(target.parent) < candidate.stat().st_size + int(self.config.reserve * 2**30):
            raise OSError(28, "no space for a copy")
        with candidate.open("rb") as source, draft.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
            sink.flush()
            os.fsync(sink.fileno())
        draft.replace(target)

    def _check_space(self, staging: Path, missing: Mapping[str, LockedFile]) -> None:
        """Compare what is missing with what is free on the file system that will receive it.

        :raises ModelError: it does not fit
        """
        parts = staging / ".parts"
        there = sum(file.stat().st_blocks * 512 for file in parts.glob("*.part"))
        need = max(0, sum(file.size for file in missing.values()) - there)
        free = free_bytes(staging)
        reserve = int(self.config.reserve * 2**30)
        if free < need + reserve:
            raise ModelError(
                f"'{staging}' has {free / 2**30:.1f} GiB free, and the model still needs "
                f"{need / 2**30:.1f} GiB beside a reserve of {self.config.reserve:g} GiB: free "
                "some space or set vllm_host_state_dir or hf_model_store to a larger disk"
            )

    def _stamp(
        self, folder: Path, lock: Lock, known: Mapping[str, Stamp] | None = None
    ) -> dict[str, Stamp]:
        """Make the manifest of files whose content was just compared with the lock."""
        stamps: dict[str, Stamp] = {}
        for path, locked in lock.files.items():
            file = folder / path
            before = (known or {}).get(path)
            if before is not None and before.still_holds(file):
                stamps[path] = before
                continue
            from_lock = locked.sha256
            if from_lock is None:
                from_lock = file_digests(file)[0]
            stamps[path] = Stamp.of(file, from_lock)
        return stamps

    def _inspect(self, folder: Path, lock: Lock) -> list[Finding]:
        """Look at the structure of what agrees with the lock.

        :raises ModelError: the repository itself is broken: a pointer or a page was committed
        """
        findings = [
            finding
            for finding in inspect_folder(folder)
            if finding.path in lock.files or finding.kind in ("missing", "index", "dangling")
        ]
        fatal = [finding for finding in findings if finding.fatal]
        for finding in findings:
            self._say(finding.message)
        if fatal:
            raise ModelError(
                f"'{lock.repo}' at {lock.commit[:12]} is as locked but cannot be served: "
                f"{fatal[0].message}",
                permanent=True,
            )
        return findings

    # -- words -----------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def _tell(self, **changes: Any) -> None:
        self._status = replace(self._status, **changes)
        self.store.write_status(self._status)

    def _progress(self, progress: Progress) -> None:
        now = time.monotonic()
        self._recent.append((now, progress.fetched))
        first, bytes_then = self._recent[0]
        rate = (progress.fetched - bytes_then) / (now - first) if now > first else 0.0
        self._tell(
            total=progress.total,
            done=progress.done,
            rate=rate,
            files_left=progress.files_left,
            file=progress.file,
            source=progress.source,
        )

    def failed(self, error: Exception) -> None:
        """Write down why the run ended."""
        if isinstance(error, Stopped):
            self._tell(state="stopped", message="stopped; the next run goes on from here")
            return
        permanent = isinstance(error, ModelError) and error.permanent
        self._tell(state="failed", message=str(error), permanent=permanent)


def main(argv: list[str]) -> int:
    """Fetch the model that a configuration file describes.

    :returns: 0 when it is there; 75 try again later; 78 a person has to change something
    """
    parser = argparse.ArgumentParser(prog="vllm-turing-host model-fetch")
    parser.add_argument("--config", type=Path, default=Path("/etc/vllm-turing/model.json"))
    parser.add_argument("--full", action="store_true", help="read every file again")
    options = parser.parse_args(argv)
    try:
        fetch = Fetch(Config.load(options.config))
    except ModelError as error:
        print(error, file=sys.stderr)
        return EXIT_PERMANENT

    def on_signal(number: int, frame: FrameType | None) -> None:
        fetch.stop()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    with fetch.store.exclusive() as ours:
        if not ours:
            print(f"another process is fetching '{fetch.config.name}'", file=sys.stderr)
            return EXIT_LATER
        try:
            if options.full:
                fetch.store.forget_verification()
            outcome = fetch.run()
        except Stopped as error:
            fetch.failed(error)
            return 0
        except ModelError as error:
            fetch.failed(error)
            print(error, file=sys.stderr)
            return EXIT_PERMANENT if error.permanent else EXIT_LATER
        except OSError as error:
            failure = ModelError(f"'{error.filename or fetch.store.root}': {error.strerror}")
            fetch.failed(failure)
            print(failure, file=sys.stderr)
            return EXIT_LATER
    print(f"{outcome.lock.repo} at {outcome.lock.commit} is complete in '{outcome.folder}'")
    return 0
