import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_turing import service_key, service_launch, service_settings

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def settings(tmp_path: Path) -> service_settings.Settings:
    release = tmp_path / "releases/abc"
    (release / "stack").mkdir(parents=True)
    (release / "release.json").write_text('{"fingerprint": "abc"}')
    caches = {"triton": "TRITON_CACHE_DIR", "pycache": "PYTHONPYCACHEPREFIX"}
    (release / "stack/stack.json").write_text(json.dumps({"caches": caches}))
    (tmp_path / "current").symlink_to(release)
    (tmp_path / "vllm.yaml").write_text("# comment\nport: 8000\n")
    (tmp_path / "api-key").write_text("the-key\n")
    return service_settings.Settings(
        name="t", host="127.0.0.1", port=8000, model_name="m", model_path=str(tmp_path),
        release_link=str(tmp_path / "current"), cache_dir=str(tmp_path / "cache"),
        config=str(tmp_path / "vllm.yaml"), environment_names=("A", "B"),
    )  # fmt: skip


def test_the_engine_gets_key_and_caches(
    settings: service_settings.Settings, tmp_path: Path
) -> None:
    env = {"A": "1", "CREDENTIALS_DIRECTORY": str(tmp_path)}
    engine, record = service_launch.prepare(settings, env, ["/bin/engine", "--x"], "digest")
    assert engine["VLLM_API_KEY"] == "the-key"
    assert engine["TRITON_CACHE_DIR"] == f"{tmp_path}/cache/abc/triton"
    assert engine["PYTHONPYCACHEPREFIX"] == f"{tmp_path}/cache/abc/pycache"
    assert record["release"] == "abc"
    assert record["unit"] == "digest"
    assert record["environment"] == service_launch.environment_digest({"A": "1", "B": None})
    assert "the-key" not in json.dumps(record)


def test_without_a_wanted_key_none_is_handed_on(settings: service_settings.Settings) -> None:
    engine, record = service_launch.prepare(
        replace(settings, api_key=False), {"VLLM_API_KEY": "stray"}, ["/bin/engine"], ""
    )
    assert "VLLM_API_KEY" not in engine
    assert record["key"] is None


def test_comments_do_not_count_in_a_digest() -> None:
    one = service_launch.text_digest("# a\nx: 1\n\n")
    assert one == service_launch.text_digest("x: 1\n  # b\n")
    assert one != service_launch.text_digest("x: 2\n")


@pytest.mark.parametrize("broken", ["current", "api-key", "vllm.yaml"])
def test_what_is_missing_is_named(
    settings: service_settings.Settings, tmp_path: Path, broken: str
) -> None:
    (tmp_path / broken).unlink()
    with pytest.raises(service_launch.LaunchError) as error:
        service_launch.prepare(settings, {"CREDENTIALS_DIRECTORY": str(tmp_path)}, ["/x"], "")
    assert str(error.value)


def test_the_launcher_becomes_the_plain_command(
    settings: service_settings.Settings, tmp_path: Path
) -> None:
    """The real program, replaced by a Python that shows its own argv and environment."""
    probe = (
        "import json,os,sys;print(json.dumps([os.getpid(),open('/proc/self/cmdline').read()"
        ".split('\\0')[:-1],os.environ.get('VLLM_API_KEY'),os.environ['TRITON_CACHE_DIR']]))"
    )
    data = {**vars(settings), "environment_names": [], "gpu_uuids": [], "device_nodes": []}
    (tmp_path / "service.json").write_text(json.dumps(data))
    runner = (
        "import sys; from pathlib import Path; from vllm_turing import service_launch as s, "
        "service_settings as c; "
        f"c.Settings.run_dir = property(lambda self: Path({str(tmp_path)!r})); "
        "sys.exit(s.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", probe, "--config", "it's"]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "module_utils"),
           "CREDENTIALS_DIRECTORY": str(tmp_path)}  # fmt: skip
    done = subprocess.Popen(
        [sys.executable, "-c", runner, "--settings", f"{tmp_path}/service.json", "--", *command],
        env=env, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    out, _ = done.communicate(timeout=60)
    pid, argv, key, triton = json.loads(out)
    assert pid == done.pid
    assert argv == command
    assert key == "the-key"
    assert Path(triton).is_dir()
    record = json.loads((tmp_path / "applied.json").read_text())
    assert record["pid"] == pid
    assert record["argv"] == command
    assert (tmp_path / "applied.json").stat().st_mode & 0o777 == 0o600


def test_a_key_is_made_once_and_for_one_reader(tmp_path: Path) -> None:
    path = tmp_path / "etc/api-key"
    assert service_key.ensure(str(path), check_mode=True).created
    assert not path.exists()
    assert service_key.ensure(str(path)).created
    key = path.read_text()
    assert len(key.strip()) == 43
    assert path.stat().st_mode & 0o777 == 0o600
    again = service_key.ensure(str(path))
    assert not again.created and not again.tightened
    path.chmod(0o644)
    assert service_key.ensure(str(path)).tightened
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_text() == key


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"nonsense": 1}, "'nonsense'"),
        ({"name": "t"}, "missing"),
        ({"port": "8000"}, "'port' is '8000'"),
        ({"api_key": 1}, "'api_key' is 1"),
        ({"gpu_uuids": "GPU-a"}, "'gpu_uuids'"),
    ],
)
def test_bad_settings_are_told(data: dict[str, object], words: str) -> None:
    with pytest.raises(service_settings.SettingsError, match=words):
        service_settings.from_mapping(data)


def test_where_to_ask_a_server_that_listens_everywhere(settings: service_settings.Settings) -> None:
    assert replace(settings, host="0.0.0.0").url == "http://127.0.0.1:8000"
    assert replace(settings, host="::").url == "http://[::1]:8000"
