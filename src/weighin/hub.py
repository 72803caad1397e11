"""A model from the Hugging Face Hub: what to download, and the download; a whole copy in the cache is used as it is."""

import errno
import glob
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from weighin import safetensors_header
from weighin.errors import BadInput

Progress = Callable[[int, int], None]  # bytes so far, bytes in all

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json")
TEMPLATE_FOLDERS = ("additional_chat_templates/", "chat_templates/")
MODEL_FILE = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
PICKLE = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin|[^/]+\.(bin|pt|pth)")
NOT_WEIGHTS = re.compile(r"training_args|optimizer|scheduler|rng_state|scaler|trainer_state")
PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
HTTP_PACKAGES = ("httpx", "httpcore", "requests", "urllib3", "huggingface_hub", "hf_xet")


class Download(msgspec.Struct, frozen=True, kw_only=True):
    """What `fetch` would do: the files of one revision, and the bytes of them that are not here yet."""

    repo: str
    revision: str
    bytes: int
    files: tuple[str, ...]


def is_hub_id(source: str) -> bool:
    """Whether what a person typed can only be a Hub id: `org/name` or `name`, and nothing local."""
    if len(source) > 96 or source.lower().endswith((".gguf", ".safetensors")) or "--" in source or ".." in source:
        return False
    return re.fullmatch(rf"(?:{PART}/)?{PART}", source) is not None and not Path(source).exists()


def resolve(
    repo: str,
    *,
    allow_pickle: bool = False,
    before: Callable[[Download], None] | None = None,
    on_progress: Progress | None = None,
) -> Path:
    """The local folder of a repository: from the cache if it is wholly there, else downloaded.

    `before` is told what will be downloaded, and may raise to stop it.
    """
    cached = find_cached(repo, allow_pickle=allow_pickle)
    if cached is not None:
        return cached
    download = look_up(repo, allow_pickle=allow_pickle)
    if before is not None:
        before(download)
    return fetch(download, on_progress)


def find_cached(repo: str, *, allow_pickle: bool = False) -> Path | None:
    """The snapshot in the local cache, if all that is needed is there; asks no network."""
    import huggingface_hub

    try:
        folder = Path(huggingface_hub.snapshot_download(repo, local_files_only=True))
    except Exception:  # not there, or half there: by an error that differs between huggingface_hub's versions
        return None
    return folder if not _lacks(folder, allow_pickle) else None


def _lacks(folder: Path, allow_pickle: bool) -> str | None:
    """What a folder lacks to be a whole model; a download may have stopped half-way, or left the tokenizer out."""
    if not (folder / "config.json").is_file():
        return "config.json"
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return "the tokenizer"
    try:
        found = safetensors_header.find(folder)
    except BadInput:
        return "some of the weights"
    pickles = [file for file in folder.iterdir() if _is_pickle(file.name)] if allow_pickle else []
    return None if any(file.is_file() for file in [*found, *pickles]) else "the weights"


def look_up(repo: str, *, allow_pickle: bool = False) -> Download:
    """What the Hub has of a repository, and how much of it would be downloaded."""
    import huggingface_hub

    with _explained(repo):
        info = huggingface_hub.HfApi().model_info(repo, files_metadata=True)
    sizes: dict[str, Any] = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    files = _needed(repo, tuple(sizes), allow_pickle)
    revision = str(info.sha or "main")
    missing = sum(int(sizes[name].size or 0) for name in files if not _is_cached(repo, revision, sizes[name]))
    return Download(repo=repo, revision=revision, bytes=missing, files=files)


def _needed(repo: str, names: tuple[str, ...], allow_pickle: bool) -> tuple[str, ...]:
    """The files of one checkpoint: no second copy in another format, no training state, no subfolders."""
    top = [name for name in names if "/" not in name]
    weights = [name for name in top if name.endswith(".safetensors")]
    if "model.safetensors" in weights:
        weights = ["model.safetensors"]
    else:
        weights = (
            [name for name in weights if MODEL_FILE.fullmatch(name)]
            or [name for name in weights if not name.startswith("consolidated")]
            or weights
        )
    if weights == ["adapter_model.safetensors"]:
        raise BadInput(
            f"{repo} on the Hub is a LoRA adapter, which weighin does not compare yet: merge it into its base first "
            "(peft's merge_and_unload, then save_pretrained) and give the merged folder."
        )
    if not weights:
        pickles = [name for name in top if _is_pickle(name)]
        weights = [name for name in pickles if name.startswith("pytorch_model")] or pickles
        if weights and not allow_pickle:
            raise BadInput(
                f"{repo} on the Hub holds its weights only as pickles ({weights[0]}, ...), and loading one can run "
                "code. Nothing was downloaded. Choose a repository with safetensors, or pass --allow-pickle."
            )
    if not weights:
        ggufs = sorted(name for name in names if name.endswith(".gguf"))
        if ggufs:
            raise BadInput(
                f"{repo} on the Hub holds GGUF files, not a model folder: download one (`hf download {repo} "
                f"{ggufs[0]}`) and give weighin the path of the file."
            )
        raise BadInput(f"{repo} on the Hub has no model weights: is it a dataset, a space, or an empty repository?")
    settings = [
        name
        for name in names
        if (name in top and (name.endswith((".json", ".model", ".jinja", ".txt")) or name.startswith("tokenizer")))
        or (name.endswith(".jinja") and name.startswith(TEMPLATE_FOLDERS))
    ]
    return tuple(sorted({*weights, *settings}))


def _is_pickle(name: str) -> bool:
    return PICKLE.fullmatch(name) is not None and NOT_WEIGHTS.search(name) is None


def _is_cached(repo: str, revision: str, sibling: Any) -> bool:
    import huggingface_hub

    if isinstance(huggingface_hub.try_to_load_from_cache(repo, sibling.rfilename, revision=revision), str):
        return True
    # the same file may be there from another revision; blobs are named by their content
    digest = getattr(sibling.lfs, "sha256", None) or sibling.blob_id
    return bool(digest) and (_blobs(repo) / str(digest)).is_file()


def _cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _blobs(repo: str) -> Path:
    return _cache() / f"models--{repo.replace('/', '--')}" / "blobs"


def fetch(download: Download, on_progress: Progress | None = None) -> Path:
    """Download what is missing into the Hugging Face cache, and give the folder."""
    import huggingface_hub

    _check_space(download)
    with _explained(download.repo), _watched(download, on_progress):
        # by the branch, not the commit: only then does the cache know the repository by name without a network
        folder = Path(
            huggingface_hub.snapshot_download(
                download.repo, allow_patterns=[glob.escape(name) for name in download.files]
            )
        )
    if download.revision not in (folder.name, "main"):
        raise BadInput(f"{download.repo} changed on the Hub during the download: run the same command again.")
    lacking = [name for name in download.files if not (folder / name).exists()]
    if lacking:
        raise BadInput(f"the download of {download.repo} did not finish ({lacking[0]} is missing): run it again.")
    return folder


def _check_space(download: Download) -> None:
    place = _cache()
    existing = next((folder for folder in (place, *place.parents) if folder.exists()), Path("/"))
    free = shutil.disk_usage(existing).free
    if download.bytes > free:
        raise BadInput(
            _no_space(download.repo, f"{download.bytes / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free")
        )


def _no_space(repo: str, figures: str) -> str:
    return (
        f"there is no room on the disk for {repo} in {_cache()}: {figures}. "
        "Free some space, or set HF_HOME to a folder on another disk."
    )


@contextmanager
def _watched(download: Download, on_progress: Progress | None) -> Iterator[None]:
    """Reports progress from the size of the cache's files: huggingface_hub's own hooks differ between its versions."""
    if on_progress is None:
        yield
        return
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    def size() -> int:
        try:
            return sum(entry.stat().st_size for entry in os.scandir(_blobs(download.repo)) if entry.is_file())
        except OSError:  # not made yet, or a part was just renamed
            return before

    before = 0
    before = size()
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.5):
            on_progress(max(0, min(size() - before, download.bytes)), download.bytes)

    bars = not are_progress_bars_disabled()
    disable_progress_bars()
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
        on_progress(download.bytes, download.bytes)
    finally:
        done.set()
        thread.join()
        if bars:
            enable_progress_bars()


@contextmanager
def _explained(repo: str) -> Iterator[None]:
    """Turns every error of huggingface_hub into one that says what to do."""
    from huggingface_hub import errors

    try:
        yield
    except BadInput:
        raise
    except errors.GatedRepoError:  # a kind of RepositoryNotFoundError, so it comes first
        raise BadInput(
            f"{repo} is gated: accept its terms on its page, huggingface.co/{repo}, then log in with `hf auth login` "
            "or set HF_TOKEN, and run the same command again."
        ) from None
    except errors.RepositoryNotFoundError:
        raise BadInput(
            f"there is no model {repo} on the Hub, or it is private. If you meant a local folder, it does not exist "
            f"(looked for {Path(repo).absolute()}). If it is private, log in with `hf auth login` or set HF_TOKEN."
        ) from None
    except errors.HFValidationError:
        raise BadInput(
            f"{repo!a} is neither a local path nor a Hub id: give a folder, a .gguf or `org/name`."
        ) from None
    except errors.OfflineModeIsEnabled:
        raise BadInput(
            f"{repo} is not wholly in the local cache ({_cache()}), and HF_HUB_OFFLINE is set: unset it to download "
            "the model, or give a local folder."
        ) from None
    except errors.HfHubHTTPError as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403):
            raise BadInput(
                f"the Hub refused {repo} (HTTP {status}): log in with `hf auth login` or set HF_TOKEN to a token that "
                "may read it."
            ) from None
        raise BadInput(f"the Hub answered HTTP {status} for {repo}: try again later, or give a local folder.") from None
    except errors.LocalEntryNotFoundError:
        raise BadInput(_unreachable(repo)) from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise BadInput(_no_space(repo, "the disk is full")) from None
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise BadInput(f"{error.filename or _cache()} cannot be written: set HF_HOME to one you own.") from None
        raise BadInput(_unreachable(repo)) from None
    except Exception as error:
        # the HTTP library and its errors changed with huggingface_hub's versions; none of them is a bug of the user
        # (hf_xet, the transfer in Rust, raises plain RuntimeErrors)
        if not (isinstance(error, RuntimeError) or type(error).__module__.startswith(HTTP_PACKAGES)):
            raise
        raise BadInput(f"{_unreachable(repo)} ({type(error).__name__})") from None


def _unreachable(repo: str) -> str:
    return (
        f"{repo} is not wholly in the local cache ({_cache()}) and the Hub cannot be reached: check the network, "
        "or give a local folder."
    )
