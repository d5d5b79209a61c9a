"""The download against a local file server that speaks the hub's and the repository's addresses."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from local_http import serve

from kvfactory.data import download as module
from kvfactory.data.__main__ import main
from kvfactory.data.download import CONFIG_FILES, FILES, download, is_complete
from kvfactory.data.longbench import locate_data
from kvfactory.data.prompts import content_sha256, load_prompts

PROMPTS = {"lcc": "{context}", "trec": "\u00e9 {context} {input}"}
LIMITS = {"lcc": 64, "trec": 64}
HUB_PATH = "/datasets/THUDM/LongBench/resolve/main/data.zip"


def archive(names=FILES, prefix="data/") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("../outside.jsonl", "never written")
        for name in names:
            out.writestr(f"{prefix}{name}", f'{{"from": "{name}"}}\n')
    return buffer.getvalue()


def broken_stream() -> bytes:
    """An archive whose first record file is not a deflate stream."""
    content = bytearray(archive())
    content[content.index(FILES[0].encode()) + len(FILES[0])] = 0xFF
    return bytes(content)


class Server:
    """Serves `files` (path -> bytes); `cut` paths send half of what they announce, `requests` lists what was asked."""

    def __init__(self):
        self.files = {
            HUB_PATH: archive(),
            "/config/dataset2prompt.json": json.dumps(PROMPTS, indent=4).encode(),
            "/config/dataset2maxlen.json": json.dumps(LIMITS).encode(),
        }
        self.cut: set[str] = set()
        self.stall: set[str] = set()
        self.requests: list[str] = []
        outer = self

        def reply(request, send_body: bool):
            outer.requests.append(request.path)
            body = outer.files.get(request.path)
            request.send_response(404 if body is None else 200)
            body = body or b""
            request.send_header("Content-Length", str(len(body)))
            request.send_header("ETag", '"abc"')
            request.send_header("X-Repo-Commit", "0" * 40)
            request.end_headers()
            if send_body:
                short = request.path in outer.cut | outer.stall
                request.wfile.write(body[: len(body) // 2] if short else body)
                request.wfile.flush()
                while request.path in outer.stall:
                    time.sleep(0.02)

        self.http, self.url = serve(reply)

    def close(self):
        self.stall.clear()
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def server(monkeypatch):
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    # The suite runs with the hub switched off; the local server stands in for it.
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(
        module,
        "OFFICIAL_SHA256",
        {"dataset2prompt.json": content_sha256(PROMPTS), "dataset2maxlen.json": content_sha256(LIMITS)},
    )
    running = Server()
    yield running
    running.close()


@pytest.fixture
def no_waiting(monkeypatch):
    """The hub client pauses between its retries; not here."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)


def everything_in(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*")) if folder.exists() else []


def fetch(server, cache):
    return download(cache, hub_url=server.url, config_url=f"{server.url}/config/")


def test_all_files_arrive_and_a_second_call_asks_nothing(server, tmp_path, monkeypatch):
    monkeypatch.setenv("KVFACTORY_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    folder = fetch(server, None)
    assert folder == tmp_path / "cache" / "LongBench"
    assert is_complete(folder)
    assert everything_in(tmp_path) == sorted(
        ["cache", "cache/LongBench", "cache/LongBench/config"]
        + [f"cache/LongBench/{n}" for n in FILES]
        + [f"cache/LongBench/config/{n}" for n in CONFIG_FILES]
    )
    assert (folder / "qasper_e.jsonl").read_text() == '{"from": "qasper_e.jsonl"}\n'
    assert locate_data(None, ["lcc"])["lcc"] == folder / "lcc.jsonl"
    prompts = load_prompts(None, ["lcc", "trec"])
    assert (prompts.source, prompts.texts) == ("longbench", PROMPTS)
    asked = len(server.requests)
    assert fetch(server, None) == folder
    assert len(server.requests) == asked


def test_a_lost_file_is_fetched_again(server, tmp_path):
    folder = fetch(server, tmp_path)
    (folder / "lcc.jsonl").unlink()
    fetch(server, tmp_path)
    assert is_complete(folder)


@pytest.mark.parametrize("path", [HUB_PATH, "/config/dataset2maxlen.json"])
def test_a_cut_connection_leaves_nothing(server, tmp_path, no_waiting, path):
    server.cut.add(path)
    with pytest.raises(ValueError, match=r"could not be downloaded .*--data_dir\.$") as error:
        fetch(server, tmp_path)
    assert "\n" not in str(error.value)
    assert everything_in(tmp_path) == []
    server.cut.clear()
    assert is_complete(fetch(server, tmp_path))


def test_a_killed_download_leaves_nothing_visible(server, tmp_path):
    """SIGTERM in the middle of the archive: the process cleans up after itself."""
    server.stall.add(HUB_PATH)
    code = (
        "import runpy, sys, kvfactory.data.prompts as p\n"
        f"p.OFFICIAL_SHA256.update({module.OFFICIAL_SHA256!r})\n"
        f"sys.argv = ['x', 'download', '--cache_dir', {str(tmp_path)!r}, '--hub_url', {server.url!r}, "
        f"'--config_url', {server.url + '/config'!r}]\n"
        "runpy.run_module('kvfactory.data', run_name='__main__')\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, cwd=Path(__file__).parents[2])
    while server.requests.count(HUB_PATH) < 2 and process.poll() is None:  # HEAD, then the GET that stalls
        time.sleep(0.02)
    assert everything_in(tmp_path), "the download is under way in its scratch folder"
    process.terminate()
    process.wait(timeout=60)
    assert process.returncode == 128 + 15, process.stderr.read()
    assert everything_in(tmp_path) == []


def test_a_wrong_hash_is_refused(server, tmp_path):
    server.files["/config/dataset2prompt.json"] = json.dumps({**PROMPTS, "lcc": "{context} "}).encode()
    with pytest.raises(ValueError, match="dataset2prompt.json was refused: the SHA-256 .*2e00731f") as error:
        fetch(server, tmp_path)
    assert content_sha256({**PROMPTS, "lcc": "{context} "}) in str(error.value)
    assert everything_in(tmp_path) == []


def test_a_page_that_is_no_json_is_refused(server, tmp_path):
    server.files["/config/dataset2prompt.json"] = b"<html>log in first</html>"
    with pytest.raises(ValueError, match="did not give LongBench's dataset2prompt.json"):
        fetch(server, tmp_path)
    assert everything_in(tmp_path) == []


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (archive(FILES[1:]), f"lacks data/{FILES[0]}"),
        (archive(prefix=""), "lacks data/"),
        (b"not a zip file", "damaged"),
        (archive()[:900] + b"\0" * 60 + archive()[960:], "damaged"),
        (broken_stream(), "damaged .*decompressing"),
    ],
    ids=["file missing", "no prefix", "no zip", "hole", "broken stream"],
)
def test_a_bad_archive_is_refused_and_the_old_files_stay(server, tmp_path, content, says):
    server.files[HUB_PATH] = content
    old = tmp_path / "LongBench" / "lcc.jsonl"
    old.parent.mkdir()
    old.write_text("old")
    with pytest.raises(ValueError, match=says):
        fetch(server, tmp_path)
    assert everything_in(tmp_path) == ["LongBench", "LongBench/lcc.jsonl"]
    assert old.read_text() == "old"


def test_an_unreachable_hub_says_what_to_do(tmp_path, no_waiting, capsys, server):
    server.files.pop(HUB_PATH)  # the hub answers 404
    with pytest.raises(ValueError, match="data.zip of THUDM/LongBench at http.*--data_dir"):
        fetch(server, tmp_path)
    closed = "http://127.0.0.1:9"  # nothing listens on the discard port
    for hub, config in ((server.url, closed), (closed, f"{server.url}/config")):
        code = main(["download", "--cache_dir", str(tmp_path), "--hub_url", hub, "--config_url", config])
        err = capsys.readouterr().err.strip().splitlines()[-1]
        assert code == 2
        assert err.startswith("error: ")
        assert "--data_dir" in err
        assert everything_in(tmp_path) == []


def test_a_cache_that_cannot_be_written_is_one_sentence(server, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match="LongBench cannot be stored under"):
        fetch(server, tmp_path / "file")


def test_the_command_prints_where_the_data_is(server, tmp_path, capsys):
    args = ["download", "--cache_dir", str(tmp_path), "--hub_url", server.url, "--config_url", f"{server.url}/config"]
    assert main(args) == 0
    assert f"LongBench is now at {tmp_path / 'LongBench'}" in capsys.readouterr().out
    assert main(args) == 0
    assert "already at" in capsys.readouterr().out


def test_the_real_prompt_files_have_the_pinned_hashes(server, tmp_path, data_dir, monkeypatch):
    from kvfactory.data.prompts import OFFICIAL_SHA256

    monkeypatch.setattr(module, "OFFICIAL_SHA256", OFFICIAL_SHA256)
    for name in CONFIG_FILES:
        server.files[f"/config/{name}"] = (data_dir / "LongBench" / "config" / name).read_bytes()
    assert load_prompts(fetch(server, tmp_path), ["lcc"]).official
