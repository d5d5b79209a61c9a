"""Fetch LongBench once into the download cache: the records from the hub, the prompt texts from the repository.

Records: `data.zip` of the dataset repository THUDM/LongBench, opened as a plain archive; its loading script is never
run (`datasets` refuses scripts since 4.0). Prompt texts and limits: the two JSON files of THUDM/LongBench at a pinned
commit, compared by the SHA-256 of their content. Everything is fetched and checked in a scratch folder first and
then moved file by file with `os.replace`, so an interrupted download leaves what was there before.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import urllib.request
import zipfile
import zlib
from pathlib import Path

from kvfactory.data.longbench import longbench_cache
from kvfactory.data.prompts import MAXLEN_FILE, OFFICIAL_SHA256, PROMPT_FILE, content_sha256
from kvfactory.data.tasks import LONGBENCH_E, TASKS
from kvfactory.paths import scratch_dir

HUB_DATASET = "THUDM/LongBench"
HUB_ARCHIVE = "data.zip"
OFFICIAL_COMMIT = "2e00731f8d0bff23dc4325161044d0ed8af94c1e"
CONFIG_URL = f"https://raw.githubusercontent.com/THUDM/LongBench/{OFFICIAL_COMMIT}/LongBench/config"
FILES = tuple(f"{name}.jsonl" for name in (*TASKS, *LONGBENCH_E))
CONFIG_FILES = (PROMPT_FILE, MAXLEN_FILE)
TIMEOUT_SECONDS = 60
OFFLINE_HINT = (
    "without a network, put the {dataset}.jsonl files, and the two prompt files under config/, into a folder and pass "
    "it to the runner with --data_dir"
)


def download(cache_dir: Path | None = None, hub_url: str | None = None, config_url: str | None = None) -> Path:
    """Fill the cache with all 34 record files and config/; what is already whole is not fetched again.

    Args:
        cache_dir: kvfactory's cache root; None takes `kvfactory.paths.cache_dir()`.
        hub_url: another hub end point (None: huggingface_hub's own, which reads HF_ENDPOINT).
        config_url: another base address for the two prompt files.

    Returns:
        The folder that holds {dataset}.jsonl and config/.

    Raises:
        ValueError: nothing could be fetched, a hash differs or the archive lacks a file; the cache is unchanged.
    """
    target = longbench_cache() if cache_dir is None else Path(cache_dir).expanduser() / "LongBench"
    if is_complete(target):
        return target
    try:
        with scratch_dir(target.parent) as scratch:
            _fetch_config(config_url or CONFIG_URL, scratch / "config")
            _unpack(_fetch_archive(hub_url, scratch / "hub"), scratch)
            (target / "config").mkdir(parents=True, exist_ok=True)
            for name in (*FILES, *(f"config/{name}" for name in CONFIG_FILES)):
                os.replace(scratch / name, target / name)
    except OSError as error:
        raise ValueError(f"LongBench cannot be stored under {target} ({error}).") from error
    return target


def is_complete(folder: Path) -> bool:
    """Whether every file is there; each was moved in whole, so its presence is enough."""
    names = (*FILES, *(f"config/{name}" for name in CONFIG_FILES))
    return all((folder / name).is_file() for name in names)


def _fetch_config(base_url: str, folder: Path) -> None:
    folder.mkdir()
    for name in CONFIG_FILES:
        url = f"{base_url.rstrip('/')}/{name}"
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as response:
                raw = response.read()
            found = content_sha256(json.loads(raw.decode("utf-8-sig")))
        except (OSError, http.client.HTTPException) as error:
            raise ValueError(f"{url} could not be downloaded ({error}); {OFFLINE_HINT}.") from error
        except ValueError as error:  # an address that is none, or a page that is not JSON
            raise ValueError(f"{url} did not give LongBench's {name} ({error}); {OFFLINE_HINT}.") from error
        if found != OFFICIAL_SHA256[name]:
            raise ValueError(
                f"{url} was refused: the SHA-256 of its content is {found}, LongBench's {name} at commit "
                f"{OFFICIAL_COMMIT[:8]} has {OFFICIAL_SHA256[name]}."
            )
        (folder / name).write_bytes(raw)


def _fetch_archive(hub_url: str | None, folder: Path) -> Path:
    from huggingface_hub import hf_hub_download

    where = f"{HUB_ARCHIVE} of {HUB_DATASET}" + (f" at {hub_url}" if hub_url else "")
    try:
        return Path(hf_hub_download(HUB_DATASET, HUB_ARCHIVE, repo_type="dataset", local_dir=folder, endpoint=hub_url))
    # The hub client lets through errors of its own, of its HTTP library (requests or httpx) and of its native
    # transfer module, with no base class in common.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{where} could not be downloaded ({type(error).__name__}: {reason}); {OFFLINE_HINT}."
        ) from error


def _unpack(archive: Path, folder: Path) -> None:
    try:
        with zipfile.ZipFile(archive) as content:
            members = {name.removeprefix("data/") for name in content.namelist() if name.startswith("data/")}
            missing = [name for name in FILES if name not in members]
            if missing:
                raise ValueError(
                    f"{HUB_ARCHIVE} of {HUB_DATASET} was refused: it lacks data/{', data/'.join(missing)}."
                )
            for name in FILES:  # by known names only, so no member can be written elsewhere
                with content.open(f"data/{name}") as source, (folder / name).open("wb") as out:
                    shutil.copyfileobj(source, out)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{HUB_ARCHIVE} of {HUB_DATASET} was refused: it is damaged ({error}).") from error
