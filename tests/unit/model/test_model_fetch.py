"""The whole program against a hub: lock, adopt, fetch, verify, promote, and all of it again."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from vllm_turing import (
    model_fetch,
    model_listing,
    model_lock,
    model_make_lock,
    model_manifest,
    model_state,
)
from vllm_turing.model_fetch import Fetch
from vllm_turing.model_lock import ModelError
from vllm_turing.model_store import Config, Status, Store
from vllm_turing.run import Result

from .conftest import FAST, REPO, Hub


def config(mirror: Hub, root: Path, **changes: Any) -> Config:
    values: dict[str, Any] = {
        "repo": REPO,
        "revision": "main",
        "name": "model",
        "store": str(root / "models"),
        "link": str(root / "models/model"),
        "sources": (mirror.url,),
        "tools_python": sys.executable,
        "reserve": 0.0,
    }
    return Config(**{**values, **changes})


def with_lock(mirror: Hub, root: Path, **changes: Any) -> Config:
    """Return a configuration with the published revision locked, as the controller does it."""
    file = root / "given.lock.json"
    file.write_text(mirror.lock.dump())
    return config(mirror, root, lock=str(file), **changes)


def run(settings: Config) -> model_fetch.Outcome:
    return Fetch(settings, FAST).run()


def test_from_nothing_with_the_hubs_own_client(mirror: Hub, tmp_path: Path) -> None:
    settings = config(mirror, tmp_path)
    outcome = run(settings)
    store = Store(settings)
    link = tmp_path / "models/model"
    assert outcome.changed
    assert link.is_symlink()
    assert link.resolve() == tmp_path / "models/.revisions/model" / mirror.lock.commit
    assert mirror.wrong_files(link) == mirror.missing_files(link) == []
    # The lock that was made holds sha256 for small files too, which the Hub does not list.
    assert store.lock() is not None
    assert {path: file.sha256 for path, file in store.lock().files.items()} == {  # type: ignore[union-attr]  # checked above
        path: file.sha256 for path, file in mirror.lock.files.items()
    }
    assert store.complete(store.lock())
    status = store.read_status()
    assert status is not None and status.state == "complete"


def test_the_second_run_asks_nobody(mirror: Hub, tmp_path: Path) -> None:
    settings = config(mirror, tmp_path)
    run(settings)
    mirror.handler.seen.clear()
    outcome = run(settings)
    assert not outcome.changed
    assert not mirror.handler.seen


def test_a_branch_that_moves_does_not_move_us(mirror: Hub, tmp_path: Path) -> None:
    settings = config(mirror, tmp_path)
    first = run(settings)
    mirror.publish({**mirror.contents, "config.json": b"{}\n"})
    assert run(settings).lock.commit == first.lock.commit
    moved = run(config(mirror, tmp_path, revision=mirror.lock.commit))
    assert moved.changed
    assert moved.lock.commit == mirror.lock.commit
    assert (tmp_path / "models/model/config.json").read_bytes() == b"{}\n"
    # Only what differs was fetched.
    assert moved.fetched == 3


def test_the_way_back_fetches_nothing(mirror: Hub, tmp_path: Path) -> None:
    first = with_lock(mirror, tmp_path)
    commit = run(first).lock.commit
    given = model_lock.load(Path(first.lock))
    mirror.publish({**mirror.contents, "config.json": b"{}\n"})
    run(with_lock(mirror, tmp_path))
    assert given is not None
    Path(first.lock).write_text(given.dump())
    back = run(first)
    assert (back.changed, back.fetched, back.lock.commit) == (True, 0, commit)


def test_a_given_lock_is_held_against_the_mirror(mirror: Hub, tmp_path: Path) -> None:
    settings = with_lock(mirror, tmp_path)
    victim = mirror.state / "hub/repos" / REPO / mirror.lock.commit / "config.json"
    victim.write_bytes(victim.read_bytes().replace(b"qwen3_5", b"qwen3_6"))
    with pytest.raises(ModelError, match=r"'config.json' has sha256 .* the mirror serves wrong"):
        run(settings)
    assert not (tmp_path / "models/model").exists()


def test_a_lock_of_another_repository_is_refused(mirror: Hub, tmp_path: Path) -> None:
    settings = with_lock(mirror, tmp_path, repo="other/model")
    with pytest.raises(ModelError, match="is for 'lab/model' and not for 'other/model'"):
        run(settings)


def test_a_changed_file_is_mended_beside_the_running_one(mirror: Hub, tmp_path: Path) -> None:
    settings = with_lock(mirror, tmp_path)
    running = run(settings).folder
    name = "model-00001-of-00003.safetensors"
    damaged = bytearray((running / name).read_bytes())
    damaged[-1] ^= 1
    times = (running / name).stat()
    (running / name).write_bytes(damaged)
    os.utime(running / name, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert not Store(settings).complete(Store(settings).lock())
    mended = run(settings)
    assert mended.folder != running
    assert mended.fetched == len(damaged)
    assert mirror.wrong_files(tmp_path / "models/model") == []
    # The engine may still have the old folder open: nothing was changed in it.
    assert (running / name).read_bytes() == damaged


def test_touched_files_are_read_and_not_fetched(mirror: Hub, tmp_path: Path) -> None:
    settings = with_lock(mirror, tmp_path)
    folder = run(settings).folder
    for file in folder.iterdir():
        if file.is_file():
            os.utime(file)
    assert not Store(settings).complete(mirror.lock)
    mirror.handler.seen.clear()
    assert not run(settings).changed
    assert not mirror.handler.seen
    assert Store(settings).complete(mirror.lock)


def test_a_folder_of_another_tool_is_adopted_where_it_is(mirror: Hub, tmp_path: Path) -> None:
    settings = with_lock(mirror, tmp_path)
    folder = Path(settings.link)
    for path, content in mirror.contents.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    outcome = run(settings)
    assert (outcome.changed, outcome.folder, outcome.fetched) == (False, folder, 0)
    assert not mirror.handler.seen
    assert Store(settings).complete(mirror.lock)


def test_a_folder_with_gaps_is_not_touched(mirror: Hub, tmp_path: Path) -> None:
    settings = with_lock(mirror, tmp_path)
    folder = Path(settings.link)
    folder.mkdir(parents=True)
    name = "model-00001-of-00003.safetensors"
    (folder / name).write_bytes(mirror.contents[name])
    (folder / "config.json").write_bytes(b"mine")
    with pytest.raises(ModelError, match="move it away and run again"):
        run(settings)
    assert (folder / "config.json").read_bytes() == b"mine"
    folder.rename(tmp_path / "elsewhere")
    outcome = run(settings)
    # All was fetched by the first run already, and what the folder had was taken over.
    assert outcome.fetched == 0
    assert mirror.sent("data") < sum(map(len, mirror.contents.values()))


def test_a_hub_cache_with_links_is_adopted(mirror: Hub, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub/models--lab--model/snapshots/abc"
    blobs = tmp_path / "hub/models--lab--model/blobs"
    blobs.mkdir(parents=True)
    for number, (path, content) in enumerate(mirror.contents.items()):
        (blobs / str(number)).write_bytes(content)
        (snapshot / path).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / path).symlink_to(blobs / str(number))
    outcome = run(with_lock(mirror, tmp_path, sources=(str(snapshot), mirror.url)))
    assert outcome.fetched == 0
    link = tmp_path / "models/model"
    assert mirror.wrong_files(link) == mirror.missing_files(link) == []
    assert not any(file.is_symlink() for file in link.iterdir())


def test_no_space_is_told_before_anything_is_fetched(mirror: Hub, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"GiB free, and the model still needs 0.0 GiB beside"):
        run(with_lock(mirror, tmp_path, reserve=1e9))
    assert mirror.sent("data") == 0


def test_old_revisions_go_but_the_one_before_stays(mirror: Hub, tmp_path: Path) -> None:
    commits = []
    for number in range(3):
        mirror.publish({**mirror.contents, "config.json": b'{"n": %d}\n' % number})
        commits.append(run(with_lock(mirror, tmp_path, keep=1)).lock.commit)
        time.sleep(0.02)
    kept = {path.name for path in (tmp_path / "models/.revisions/model").iterdir() if path.is_dir()}
    assert kept == set(commits[1:])


def test_an_old_revision_in_use_stays(mirror: Hub, tmp_path: Path) -> None:
    first = run(with_lock(mirror, tmp_path, keep=0)).folder
    with (first / "config.json").open():
        mirror.publish({**mirror.contents, "config.json": b"{}\n"})
        run(with_lock(mirror, tmp_path, keep=0))
        assert first.is_dir()
    assert Store(with_lock(mirror, tmp_path, keep=0)).prune() == [first]


def test_a_repository_that_holds_a_pointer_is_not_promoted(mirror: Hub, tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
    mirror.publish({**mirror.contents, "vocab.json": pointer})
    with pytest.raises(ModelError, match=r"cannot be served: 'vocab\.json' is a git LFS pointer"):
        run(with_lock(mirror, tmp_path))
    assert not (tmp_path / "models/model").exists()


@pytest.mark.parametrize(
    ("faults", "changes", "says"),
    [
        ([], {"repo": "lab/other"}, "has no repository 'lab/other'"),
        ([], {"revision": "nothing"}, "no revision 'nothing' of it"),
        ([], {"sources": ("http://127.0.0.1:9",)}, "'127.0.0.1:9' cannot be reached"),
        ([{"kind": "login", "where": "revision"}], {}, "does not answer as a Hub does"),
        ([{"kind": "status", "where": "tree", "status": 403}], {}, "(status 403)"),
    ],
)
def test_a_listing_that_fails_says_so(
    mirror: Hub, tmp_path: Path, faults: list[Any], changes: dict[str, Any], says: str
) -> None:
    mirror.faults(*faults)
    with pytest.raises(ModelError) as caught:
        run(config(mirror, tmp_path, **changes))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_listing_survives_a_busy_hub(mirror: Hub, tmp_path: Path) -> None:
    busy = {"kind": "status", "where": "revision", "status": 503, "retry_after": 0, "times": 2}
    mirror.faults(busy)
    assert run(config(mirror, tmp_path)).changed


def test_the_second_hub_lists_when_the_first_is_dead(mirror: Hub, tmp_path: Path) -> None:
    assert run(config(mirror, tmp_path, sources=("http://127.0.0.1:9", mirror.url))).changed


def test_no_request_goes_to_another_endpoint(
    mirror: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert run(config(mirror, tmp_path, sources=(f"{mirror.url}/",))).changed


@pytest.mark.parametrize("source", ["hf-mirror.com", "ftp://x/y", "https://user:pw@host"])
def test_sources_that_are_none(mirror: Hub, tmp_path: Path, source: str) -> None:
    with pytest.raises(ModelError) as caught:
        run(config(mirror, tmp_path, sources=(source,)))
    assert "pw@" not in str(caught.value)


def test_the_token_is_in_no_message_and_no_status(
    mirror: Hub, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    secret = tmp_path / "token"
    secret.write_text("hf_verysecret\n")
    mirror.faults({"kind": "status", "where": "resolve", "status": 401})
    with pytest.raises(ModelError) as caught:
        run(config(mirror, tmp_path, token_file=str(secret)))
    assert any(seen.authorization for seen in mirror.handler.seen)
    texts = [str(caught.value), *capfd.readouterr()]
    texts += [p.read_text() for p in (tmp_path / "models").rglob("*.json") if p.is_file()]
    assert not any("hf_verysecret" in text for text in texts)


# -- the program and what the Ansible module sees ------------------------------------------------


def write_config(settings: Config, file: Path) -> Path:
    file.write_text(json.dumps(vars(settings)))
    return file


def test_the_program(mirror: Hub, tmp_path: Path) -> None:
    file = write_config(with_lock(mirror, tmp_path), tmp_path / "model.json")
    assert model_fetch.main(["--config", str(file)]) == 0
    assert model_fetch.main(["--config", str(file), "--full"]) == 0
    assert model_fetch.main(["--config", str(tmp_path / "none.json")]) == 78


def test_the_program_tells_why_it_failed(mirror: Hub, tmp_path: Path) -> None:
    settings = with_lock(mirror, tmp_path, repo="other/model")
    file = write_config(settings, tmp_path / "model.json")
    assert model_fetch.main(["--config", str(file)]) == 78
    status = Store(settings).read_status()
    assert status is not None
    assert status.permanent and "is for 'lab/model'" in status.message


def test_two_at_once_are_one(mirror: Hub, tmp_path: Path) -> None:
    settings = with_lock(mirror, tmp_path)
    file = write_config(settings, tmp_path / "model.json")
    with Store(settings).exclusive() as ours:
        assert ours
        assert model_fetch.main(["--config", str(file)]) == 75


class Systemd:
    """A systemd that starts nothing and remembers what it was asked."""

    def __init__(self, state: str = "inactive") -> None:
        self.state = state
        self.asked: list[str] = []

    def __call__(self, argv: Any, **unused: Any) -> Result:
        self.asked.append(argv[1])
        return Result(tuple(argv), 0, stdout=f"{self.state}\n")


def test_the_view_of_a_fresh_box(mirror: Hub, tmp_path: Path) -> None:
    view = model_state.look(config(mirror, tmp_path), Systemd())
    assert (view.complete, view.running, view.line) == (False, False, "not started")
    missing = config(mirror, tmp_path, lock=str(tmp_path / "not-yet"))
    assert not model_state.look(missing, Systemd(), tolerant=True).complete
    with pytest.raises(ModelError, match="does not exist"):
        model_state.look(missing, Systemd())


def test_the_view_of_a_converged_box(mirror: Hub, tmp_path: Path) -> None:
    settings = with_lock(mirror, tmp_path)
    folder = run(settings).folder
    view = model_state.look(settings, Systemd())
    assert view.complete
    assert view.folder == str(folder)
    assert view.line.startswith(f"complete at {mirror.lock.commit[:12]}")


def test_waiting_ends_with_the_reason(mirror: Hub, tmp_path: Path) -> None:
    settings = config(mirror, tmp_path)
    Store(settings).write_status(Status("failed", message="'x' is down"))
    with pytest.raises(ModelError, match="'x' is down"):
        model_state.wait(settings, 30, Systemd())
    view = model_state.wait(settings, 0.1, Systemd("activating"))
    assert (view.running, view.line) == (True, "trying again: 'x' is down")


def test_other_settings_restart_a_running_fetch(mirror: Hub, tmp_path: Path) -> None:
    Store(config(mirror, tmp_path)).write_status(Status("fetching", total=10, done=5))
    same = model_state.look(config(mirror, tmp_path), Systemd("active"))
    assert not same.stale
    assert same.line.startswith("50 %")
    other = config(mirror, tmp_path, bandwidth=1.0)
    assert model_state.look(other, Systemd("active")).stale
    systemd = Systemd()
    model_state.start(other, systemd, restart=True)
    assert systemd.asked == ["daemon-reload", "reset-failed", "restart"]


def test_removal_leaves_what_was_there_before(mirror: Hub, tmp_path: Path) -> None:
    settings = with_lock(mirror, tmp_path)
    run(settings)
    other = tmp_path / "models/other"
    other.mkdir()
    would = model_state.remove(settings, Systemd(), data=True, check=True)
    assert (tmp_path / "models/model").is_symlink()
    assert model_state.remove(settings, Systemd(), data=True, check=False) == would
    assert other.is_dir()
    assert not (tmp_path / "models/model").is_symlink()
    assert model_state.remove(settings, Systemd(), data=True, check=False) == []


def test_the_converged_check_does_not_read_the_files(tmp_path: Path) -> None:
    """Fourteen sparse files of 29 GB in all are checked in well under a second."""
    folder = tmp_path / "models/.revisions/model/c"
    folder.mkdir(parents=True)
    files = {}
    for number in range(14):
        name = f"model-{number:05d}-of-00014.safetensors"
        with (folder / name).open("wb") as stream:
            stream.truncate(29_000_000_000 // 14)
        files[name] = model_lock.LockedFile(29_000_000_000 // 14, "a" * 64)
    stamps = {name: model_manifest.Stamp.of(folder / name, "a" * 64) for name in files}
    started = time.monotonic()
    assert model_manifest.unverified(folder, files, stamps) == []
    assert time.monotonic() - started < 0.5
    (folder / "model-00003-of-00014.safetensors").touch()
    assert model_manifest.unverified(folder, files, stamps) == ["model-00003-of-00014.safetensors"]


def test_a_status_reads_as_a_line() -> None:
    status = Status(
        "fetching", total=29_000_000_000, done=12_300_000_000, rate=85e6, file="m", source="hub"
    )
    assert status.line() == "42 %, 12.30 of 29.00 GB, 85.0 MB/s, 3:16 left, m from hub"


def test_a_lock_is_made_without_the_weights(mirror: Hub, tmp_path: Path) -> None:
    output = tmp_path / "made.lock.json"
    assert model_make_lock.main([REPO, "--endpoint", mirror.url, "--output", str(output)]) == 0
    made = model_lock.load(output)
    assert made == mirror.lock
    assert mirror.sent("data") == 0
    assert run(config(mirror, tmp_path, lock=str(output))).changed


def test_a_lock_that_cannot_be_made(
    mirror: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "made.lock.json"
    arguments = ["lab/other@main", "--endpoint", mirror.url, "--output", str(output)]
    assert model_make_lock.main(arguments) == 1
    assert "has no repository 'lab/other'" in capsys.readouterr().err
    assert not output.exists()


def test_a_bare_token_name_is_a_credential_of_the_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hub-token").write_text("hf_x\n")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert model_listing.read_token("hub-token") == "hf_x"
    assert model_listing.read_token("") == ""
    with pytest.raises(ModelError, match="token file '/nowhere/token' cannot be read"):
        model_listing.read_token("/nowhere/token")
