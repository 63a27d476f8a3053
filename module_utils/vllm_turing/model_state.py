"""How a host stands with its model, and its background unit: what the Ansible module asks."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from .model_lock import Lock, ModelError
from .model_store import Config, Status, Store
from .run import Runner, run

UNIT = "vllm-turing-model.service"


@dataclass(frozen=True)
class View:
    """One look at a host.

    :ivar complete: the link leads to verified files of the lock
    :ivar running: the unit works, or waits for its next try
    :ivar problem: why the last run ended without the model; "" when it did not
    """

    complete: bool
    running: bool
    commit: str
    folder: str
    size: int
    done: int
    line: str
    problem: str
    stale: bool

    def as_dict(self) -> dict[str, object]:
        """Return what a playbook gets to see."""
        return {
            "complete": self.complete,
            "running": self.running,
            "commit": self.commit,
            "folder": self.folder,
            "size": self.size,
            "progress": self.line,
        }


def look(config: Config, runner: Runner = run, *, tolerant: bool = False) -> View:
    """Look at the files, the status and the unit; nothing is changed.

    :param tolerant: a lock that is not installed yet counts as none (check mode, fresh box)
    :raises ModelError: the lock that holds here is damaged or for another repository
    """
    store = Store(config)
    try:
        lock: Lock | None = store.lock()
    except ModelError:
        if not tolerant:
            raise
        lock = None
    complete = store.complete(lock)
    status = store.read_status()
    running = unit_state(runner) in ("active", "activating", "reloading", "deactivating")
    own = status is not None and status.config == config.digest
    folder = store.current()
    problem = ""
    if status is not None and own and status.state in ("failed", "stopped"):
        problem = status.message
    return View(
        complete=complete,
        running=running,
        commit=lock.commit if lock else "",
        folder=str(folder) if complete and folder else "",
        size=lock.size if lock else 0,
        done=status.done if status is not None and own else 0,
        line=_line(status if own else None, complete, lock, problem),
        problem=problem,
        stale=running and status is not None and not own,
    )


def _line(status: Status | None, complete: bool, lock: Lock | None, problem: str) -> str:
    if complete and lock is not None:
        return f"complete at {lock.commit[:12]}, {lock.size / 1e9:.2f} GB"
    if status is None:
        return "not started"
    return f"trying again: {problem}" if problem else status.line()


def unit_state(runner: Runner = run) -> str:
    """Return the unit's ActiveState; "" where systemd does not answer."""
    done = runner(["systemctl", "show", "--property=ActiveState", "--value", UNIT], timeout=20)
    return done.stdout.strip() if done.ok else ""


def start(config: Config, runner: Runner = run, *, restart: bool = False) -> None:
    """Start the unit and return at once.

    :param restart: it works by other settings and has to begin anew
    :raises ModelError: systemd refuses
    """
    verb = "restart" if restart else "start"
    for command in (
        ["systemctl", "daemon-reload"],
        ["systemctl", "reset-failed", UNIT],
        ["systemctl", verb, "--no-block", UNIT],
    ):
        done = runner(command, timeout=60)
        # A unit that never failed cannot be reset; that is no trouble.
        if not done.ok and "reset-failed" not in command:
            said = (done.error or done.stderr.strip() or f"status {done.rc}").splitlines()[-1]
            raise ModelError(f"'{UNIT}' cannot be started: {said}")


def wait(config: Config, seconds: float, runner: Runner = run) -> View:
    """Wait until the model is complete, the unit has given up, or time is over.

    :raises ModelError: the unit ended without the model
    """
    deadline = time.monotonic() + seconds
    idle = 0
    while True:
        view = look(config, runner)
        if view.complete:
            return view
        # The unit may just be between two states: it has given up only if that lasts.
        idle = 0 if view.running else idle + 1
        if idle >= 3:
            raise ModelError(
                view.problem
                or f"'{UNIT}' ended without the model; its log: journalctl -u {UNIT} -n 50"
            )
        if time.monotonic() >= deadline:
            return view
        time.sleep(min(0.5, max(0.05, deadline - time.monotonic())))


def remove(config: Config, runner: Runner = run, *, data: bool, check: bool) -> list[str]:
    """Stop the unit and, if asked for, remove the model's files.

    :param check: only tell what would be done
    :returns: what was running or there
    :raises ModelError: systemd does not stop the unit
    """
    removed = []
    if unit_state(runner) in ("active", "activating", "reloading"):
        removed.append(f"{UNIT} running")
        if not check:
            done = runner(["systemctl", "stop", UNIT], timeout=60)
            if not done.ok:
                said = done.error or done.stderr.strip()
                raise ModelError(f"'{UNIT}' cannot be stopped: {said}")
    if data:
        for path in Store(config).own_paths():
            if path.is_symlink() or path.exists():
                removed.append(str(path))
                if not check:
                    _delete(path)
    return removed


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
