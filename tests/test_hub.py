"""What a person sees who names a model on the Hub: with a network, without one, and when the Hub says no."""

import errno
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from weighin import hub
from weighin.errors import BadInput

REVISION = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": 100,
    "tokenizer.json": 200,
    "model-00001-of-00002.safetensors": 4000,
    "model-00002-of-00002.safetensors": 3000,
    "model.safetensors.index.json": 50,
    "chat_template.jinja": 5,
    "merges.txt": 6,
    "README.md": 7,
    "consolidated.safetensors": 7000,
    "pytorch_model.bin": 7000,
    "original/params.json": 9,
    "original/consolidated.00.pth": 7000,
    "onnx/model.safetensors": 7000,
    "additional_chat_templates/tool.jinja": 3,
}
NEEDED = {
    "config.json", "tokenizer.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
    "model.safetensors.index.json", "chat_template.jinja", "merges.txt", "additional_chat_templates/tool.jinja",
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, and no network: what a test does not answer for the Hub fails."""
    place = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(place))
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *args, **options: None)
    online(monkeypatch, AssertionError("asked the network"))
    return place


def online(monkeypatch: pytest.MonkeyPatch, answer: dict[str, int] | Exception) -> list[dict[str, Any]]:
    """The Hub answers so; the list collects the downloads asked for."""
    asked: list[dict[str, Any]] = []

    def model_info(self: Any, repo: str, **options: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        siblings = [
            SimpleNamespace(rfilename=name, size=size, lfs=None, blob_id=f"blob-{name.replace('/', '-')}")
            for name, size in answer.items()
        ]
        return SimpleNamespace(sha=REVISION, siblings=siblings)

    def snapshot_download(repo: str, **options: Any) -> str:
        if options.get("local_files_only"):
            raise errors.LocalEntryNotFoundError("not here")
        asked.append(options)
        folder = Path(constants.HF_HUB_CACHE) / "models--org--name" / "snapshots" / REVISION
        for name in options["allow_patterns"]:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(b"")
        return str(folder)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


def http_error(kind: type[Exception], status: int) -> Exception:
    error = kind.__new__(kind)  # the constructor's arguments differ between huggingface_hub's versions
    error.response = SimpleNamespace(status_code=status)  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("org/name", True), ("gpt2", True), ("google/gemma-3-4b-it", True), ("Qwen/Qwen2.5-0.5B", True),
        ("./name", False), ("/abs/name", False), ("a/b/c", False), ("model.gguf", False), ("org/model.GGUF", False),
        ("../up", False), ("", False), ("name/", False), ("a b", False), ("x" * 97, False), ("org/na--me", False),
        ("~/m", False),
    ],
)  # fmt: skip
def test_what_is_a_hub_id(source: str, expected: bool) -> None:
    assert hub.is_hub_id(source) is expected


def test_what_exists_here_is_not_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert not hub.is_hub_id("org/name")


def test_only_one_copy_of_the_model_would_be_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    online(monkeypatch, FILES)
    download = hub.look_up("org/name")
    assert set(download.files) == NEEDED
    assert download.bytes == sum(FILES[name] for name in NEEDED)
    assert (download.repo, download.revision) == ("org/name", REVISION)


def test_what_is_in_the_cache_is_not_counted(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    online(monkeypatch, FILES)
    blobs = cache / "models--org--name" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "blob-model-00001-of-00002.safetensors").write_bytes(b"")
    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda repo, name, **o: "/here" if name == "config.json" else None
    )
    assert hub.look_up("org/name").bytes == sum(FILES[name] for name in NEEDED) - 4000 - 100


def test_resolve_says_what_it_will_download_and_then_does(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = online(monkeypatch, FILES)
    told: list[hub.Download] = []
    progress: list[tuple[int, int]] = []
    path = hub.resolve("org/name", before=told.append, on_progress=lambda done, total: progress.append((done, total)))
    assert path.name == REVISION
    assert set(asked[0]["allow_patterns"]) == NEEDED
    assert told[0].bytes == progress[-1][0] == progress[-1][1]


def test_a_download_can_be_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = online(monkeypatch, FILES)

    def decline(download: hub.Download) -> None:
        raise BadInput("no")

    with pytest.raises(BadInput, match="no"):
        hub.resolve("org/name", before=decline)
    assert not asked


def test_pickles_on_the_hub_are_refused_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    online(monkeypatch, {"config.json": 1, "tokenizer.json": 1, "pytorch_model.bin": 9, "training_args.bin": 1})
    with pytest.raises(BadInput, match="--allow-pickle"):
        hub.look_up("org/name")
    assert set(hub.look_up("org/name", allow_pickle=True).files) == {
        "config.json",
        "tokenizer.json",
        "pytorch_model.bin",
    }


@pytest.mark.parametrize(
    ("files", "part"),
    [
        ({"model-q4.gguf": 9, "README.md": 1}, "hf download org/name model-q4.gguf"),
        ({"adapter_model.safetensors": 9, "adapter_config.json": 1}, "LoRA"),
        ({"README.md": 1}, "no model weights"),
    ],
)
def test_a_repository_that_is_no_model_folder(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, int], part: str
) -> None:
    online(monkeypatch, files)
    with pytest.raises(BadInput, match=part):
        hub.look_up("org/name")


@pytest.mark.parametrize(
    ("error", "parts"),
    [
        (http_error(errors.GatedRepoError, 403), ["gated", "huggingface.co/org/name", "hf auth login", "HF_TOKEN"]),
        (http_error(errors.RepositoryNotFoundError, 404), ["no model org/name", "local folder"]),
        (http_error(errors.HfHubHTTPError, 503), ["HTTP 503", "later"]),
        (http_error(errors.HfHubHTTPError, 401), ["HTTP 401", "HF_TOKEN"]),
        (errors.HFValidationError("x"), ["neither"]),
        (errors.OfflineModeIsEnabled("x"), ["HF_HUB_OFFLINE"]),
        (errors.LocalEntryNotFoundError("x"), ["cannot be reached"]),
        (ConnectionError("x"), ["cannot be reached", "network"]),
        (OSError(errno.ENOSPC, "full"), ["no room", "HF_HOME"]),
        (PermissionError(errno.EACCES, "no", "/cache"), ["/cache", "HF_HOME"]),
        (RuntimeError("xet"), ["cannot be reached", "RuntimeError"]),
    ],
)
def test_every_refusal_of_the_hub_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, error: Exception, parts: list[str]
) -> None:
    online(monkeypatch, error)
    with pytest.raises(BadInput) as raised:
        hub.resolve("org/name")
    for part in parts:
        assert part in str(raised.value)


def test_a_network_library_that_fails_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    library = importlib.import_module(errors.HfHubHTTPError.__mro__[1].__module__.split(".")[0])
    online(monkeypatch, library.ConnectError("no route"))
    with pytest.raises(BadInput, match="cannot be reached"):
        hub.look_up("org/name")


def test_our_own_bugs_are_not_hidden_as_the_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    online(monkeypatch, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        hub.look_up("org/name")


def test_a_disk_that_is_too_small_is_said_before_the_download(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = online(monkeypatch, FILES | {"model-00001-of-00002.safetensors": 10**18})
    with pytest.raises(BadInput, match="no room") as raised:
        hub.resolve("org/name")
    assert "1000000000.0 GB are needed" in str(raised.value)
    assert not asked


def test_a_repository_that_changes_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    online(monkeypatch, FILES)
    with pytest.raises(BadInput, match="changed"):
        hub.fetch(hub.Download(repo="org/name", revision="f" * 40, bytes=1, files=("config.json",)))


# --- the real huggingface_hub, offline, on a cache made by hand


def make_cache(home: Path, *, without: str = "") -> Path:
    repo = home / "models--org--name"
    snapshot = repo / "snapshots" / REVISION
    for folder in (repo / "blobs", repo / "refs", snapshot):
        folder.mkdir(parents=True)
    (repo / "refs" / "main").write_text(REVISION)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    for name in sorted(NEEDED - {without, "additional_chat_templates/tool.jinja"}):
        (repo / "blobs" / f"b-{name}").write_text(json.dumps(index) if name.endswith("index.json") else "{}")
        (snapshot / name).symlink_to(f"../../blobs/b-{name}")
    return snapshot


def resolve_offline(home: Path, tmp_path: Path, repo: str = "org/name") -> str:
    code = (
        "import sys\nfrom weighin import hub\nfrom weighin.errors import BadInput\n"
        "try: print(hub.resolve(sys.argv[1]))\nexcept BadInput as error: print('BadInput', error)"
    )
    env = {**os.environ, "HF_HUB_CACHE": str(home), "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, repo], env=env, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_offline_with_the_model_in_the_cache(tmp_path: Path) -> None:
    snapshot = make_cache(tmp_path / "real")
    assert resolve_offline(tmp_path / "real", tmp_path) == str(snapshot)


@pytest.mark.parametrize("without", ["model-00002-of-00002.safetensors", "tokenizer.json", "config.json"])
def test_offline_with_a_part_of_the_model_in_the_cache(tmp_path: Path, without: str) -> None:
    make_cache(tmp_path / "real", without=without)
    answer = resolve_offline(tmp_path / "real", tmp_path)
    assert answer.startswith("BadInput")
    assert "not wholly in the local cache" in answer
    assert "HF_HUB_OFFLINE" in answer


def test_offline_without_the_model(tmp_path: Path) -> None:
    assert "HF_HUB_OFFLINE" in resolve_offline(tmp_path / "real", tmp_path)
