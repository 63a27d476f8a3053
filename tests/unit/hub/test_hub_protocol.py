"""The lab's hub, model and git mirror, asked by the clients that real ones are asked by."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lab import git_mirror, hub, tiny_model
from vllm_turing.model_safetensors import inspect_folder

CLIENT = """
import json, sys
from huggingface_hub import HfApi, snapshot_download
repo, folder = sys.argv[1:]
info = HfApi().model_info(repo)
snapshot_download(repo, local_dir=folder, revision=info.sha)
print(json.dumps({"sha": info.sha}))
"""


class Lab:
    """A state folder and the address of the server that serves it."""

    def __init__(self, state: Path, port: int, handler: hub.HubHandler) -> None:
        self.state = state
        self.base = f"http://127.0.0.1:{port}"
        self.handler = handler


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    state = tmp_path_factory.mktemp("lab")
    hub.prepare(state)
    git_mirror.prepare(state)
    handlers = [hub.create_handler(state), git_mirror.create_handler(state)]

    class Request(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if not any(handler.handle(self, self.path) for handler in handlers):
                self.send_error(404)

        do_HEAD = do_GET
        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Request)
    threading.Thread(target=server.serve_forever, daemon=True, args=(0.05,)).start()
    yield Lab(state, server.server_port, handlers[0])  # type: ignore[arg-type]  # the first is it
    server.shutdown()
    server.server_close()


def test_the_hubs_own_client_gets_the_model(lab: Lab, tmp_path: Path) -> None:
    environment = {"HF_ENDPOINT": f"{lab.base}/hub", "HF_HUB_DISABLE_XET": "1"}
    environment |= {"HF_HOME": str(tmp_path / "home"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, hub.REPOSITORY, str(tmp_path / "model")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    files = tiny_model.model_files()
    assert json.loads(done.stdout)["sha"] == hub.prepare(lab.state).commit
    for path, content in files.items():
        assert (tmp_path / "model" / path).read_bytes() == content


def test_the_published_commit_is_always_the_same(tmp_path: Path) -> None:
    # Whoever changes the tiny model changes this, and with it what locked inventories hold to.
    assert hub.prepare(tmp_path).commit == "a9ba49f3d18fe66d6de9929d54b0f77f0b3a739b"


def head(url: str) -> tuple[int, dict[str, str]]:
    class Stay(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *unused: object) -> None:
            return None

    request = urllib.request.Request(url, method="HEAD")
    try:
        with urllib.request.build_opener(Stay).open(request, timeout=10) as answer:
            return answer.status, dict(answer.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers)


def test_large_files_redirect_to_the_cdn_and_say_what_they_are(lab: Lab) -> None:
    repo = hub.prepare(lab.state)
    name = "mtp.safetensors"
    status, headers = head(f"{lab.base}/hub/{repo.name}/resolve/main/{name}")
    assert status == 302
    assert "/cdn/" in headers["Location"]
    assert headers["X-Repo-Commit"] == repo.commit
    assert headers["X-Linked-Etag"] == f'"{repo.files[name].sha256}"'
    assert headers["X-Linked-Size"] == str(repo.files[name].size)


def test_small_files_redirect_to_a_relative_path(lab: Lab) -> None:
    repo = hub.prepare(lab.state)
    status, headers = head(f"{lab.base}/hub/{repo.name}/resolve/main/config.json")
    assert status == 307
    assert headers["Location"].startswith("/hub/api/resolve-cache/models/")
    status, headers = head(f"{lab.base}{headers['Location']}")
    assert status == 200
    assert headers["ETag"] == f'"{repo.files["config.json"].blob_id}"'


def test_the_tree_comes_in_pages(lab: Lab) -> None:
    repo = hub.prepare(lab.state)
    url: str | None = f"{lab.base}/hub/api/models/{repo.name}/tree/main?recursive=True&limit=5"
    seen = []
    while url:
        with urllib.request.urlopen(url, timeout=10) as answer:
            seen += [entry["path"] for entry in json.load(answer)]
            link = answer.headers.get("Link")
        url = link.partition(">")[0].removeprefix("<") if link else None
    assert seen == list(repo.files)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/hub/api/models/no/body", 401),
        (f"/hub/api/models/{hub.REPOSITORY}/revision/nothing", 404),
        (f"/hub/{hub.REPOSITORY}/resolve/main/nothing", 404),
        (f"/hub/{hub.REPOSITORY}/resolve/main/../../../faults.json", 404),
        ("/git/weicj/FlashQLA-SM70-SM75.git/../../../hub/faults.json", 404),
        ("/git/%2e%2e/hub/faults.json", 404),
        ("/elsewhere", 404),
    ],
)
def test_what_is_not_there(lab: Lab, path: str, status: int) -> None:
    hub.set_faults(lab.state)
    assert head(f"{lab.base}{path}")[0] == status


def test_ranges(lab: Lab) -> None:
    repo = hub.prepare(lab.state)
    url = f"{lab.base}/hub/cdn/{repo.name}/{repo.commit}/mtp.safetensors"
    content = (repo.folder / "mtp.safetensors").read_bytes()
    request = urllib.request.Request(url, headers={"Range": "bytes=10-19"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.status == 206
        assert answer.read() == content[10:20]
        assert answer.headers["Content-Range"] == f"bytes 10-19/{len(content)}"
    request = urllib.request.Request(url, headers={"Range": f"bytes={len(content)}-"})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=10)
    assert caught.value.code == 416


def test_a_fault_strikes_as_often_as_it_is_told(lab: Lab) -> None:
    url = f"{lab.base}/hub/api/models/{hub.REPOSITORY}"
    hub.set_faults(lab.state, {"kind": "status", "where": "revision", "status": 503, "times": 2})
    assert [head(url)[0] for _ in range(3)] == [503, 503, 200]
    hub.set_faults(lab.state)
    assert head(url)[0] == 200


def test_a_fault_of_no_known_kind_is_refused(lab: Lab) -> None:
    with pytest.raises(hub.HubError, match="'gremlins' is no fault; use one of: reset"):
        hub.set_faults(lab.state, {"kind": "gremlins"})


def test_git_clones_the_stand_in(lab: Lab, tmp_path: Path) -> None:
    for name in (git_mirror.REPOSITORY, git_mirror.ALIAS):
        checkout = tmp_path / name.replace("/", "-")
        url = f"{lab.base}/git/{name}.git"
        subprocess.run(["git", "clone", "-q", url, str(checkout)], check=True, timeout=60)
        commit = subprocess.check_output(
            ["git", "-C", str(checkout), "rev-parse", "HEAD"], text=True, timeout=60
        )
        assert commit.strip() == git_mirror.COMMIT
        for path, digest in git_mirror.digests().items():
            assert hashlib.sha256((checkout / path).read_bytes()).hexdigest() == digest


def test_the_stand_in_refuses_to_import_as_the_real_one_does(lab: Lab, tmp_path: Path) -> None:
    for path, text in git_mirror.FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    # A torch without a card, as far as the guard asks.
    torch = "class cuda:\n    is_available = staticmethod(lambda: False)\n"
    (tmp_path / "torch.py").write_text(torch)
    done = subprocess.run(
        [sys.executable, "-c", "import flash_qla"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ValueError: FlashQLA now support sm90 only."


# -- the tiny model ------------------------------------------------------------------------------


def test_the_model_is_in_order_and_the_same_each_time(tmp_path: Path) -> None:
    sizes = tiny_model.write_model(tmp_path)
    assert inspect_folder(tmp_path, sizes) == []
    assert tiny_model.model_files() == {
        path: (tmp_path / path).read_bytes() for path in sorted(sizes)
    }
    other = tiny_model.model_files(seed=1)
    assert {path for path in other if other[path] != tiny_model.model_files()[path]} == {
        path for path in other if path.endswith(".safetensors")
    }


def test_the_model_has_the_reference_models_parts() -> None:
    files = tiny_model.model_files()
    config = json.loads(files["config.json"])
    assert config["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    assert config["text_config"]["layer_types"] == ["linear_attention"] * 3 + ["full_attention"]
    names = json.loads(files["model.safetensors.index.json"])["weight_map"]
    assert {name.partition(".")[0] for name in names} == {"lm_head", "model", "mtp"}
    assert {"visual.safetensors", "mtp.safetensors"} <= set(names.values())


def test_the_tokenizer_covers_every_byte_and_its_ids_are_dense() -> None:
    tokenizer = json.loads(tiny_model.model_files()["tokenizer.json"])
    vocab = tokenizer["model"]["vocab"]
    added = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    assert sorted([*vocab.values(), *added.values()]) == list(range(tiny_model.VOCABULARY))
    assert set(tiny_model.byte_alphabet().values()) <= set(vocab)
    for left, right in tokenizer["model"]["merges"]:
        assert left + right in vocab
    assert not {token["content"] for token in tokenizer["added_tokens"] if token["special"]} & {
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
    }
