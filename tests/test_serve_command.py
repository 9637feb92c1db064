"""``twell serve`` from the command line."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import Twell

openai = pytest.importorskip("openai", reason="needs pip install 'twell[serve]' openai")
pytest.importorskip("uvicorn", reason="needs pip install 'twell[serve]'")
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import twell
from serving import SHAPE, post
from twell import serve

# ---------------------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------------------


def test_the_command_from_start_to_ctrl_c(folder: Path, tmp_path: Path) -> None:
    """What a newcomer does: start it, send what it prints as an example, use the client, end it with Ctrl-C."""
    folder = shutil.copytree(folder, tmp_path / "my-run" / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 20_000}))
    command = [sys.executable, "-m", "twell", "serve", str(folder), "--port", "0", "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, encoding="utf-8"
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        said = ""
        while "Ctrl-C ends it" not in said:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            said += line
        assert f"{folder}, float32, on cpu" in said
        assert "sparse:   all 2 feed-forward layers" in said
        assert "frozen:   2 feed-forward layers frozen, 0.0 MB beside their weights\n" in said
        assert "requests: computed together, up to 20,000 tokens each" in said
        assert "warning" not in said
        url = re.search(r"address:  (http://127\.0\.0\.1:\d+)/v1", said)
        assert url is not None
        words = shlex.split(said[said.index("curl ") : said.index("Ctrl-C")].replace("\\\n", ""))
        assert words[1].startswith(url[1])
        status, answer = post(url[1], words[1].removeprefix(url[1]), words[words.index("-d") + 1].encode())
        assert status == 200 and 1 <= answer["usage"]["completion_tokens"] <= 32
        client = openai.OpenAI(base_url=f"{url[1]}/v1", api_key="none", max_retries=0)
        assert [model.id for model in client.models.list()] == ["my-run"]  # a run's model is called by the run
        stream = client.completions.create(model="my-run", prompt="Once", max_tokens=19_000, temperature=0, stream=True)
        next(iter(stream))
        process.send_signal(signal.SIGTERM)  # answers under way go on
        for _ in range(50):
            next(iter(stream))
        process.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError, match="the server is stopping"):
            list(stream)
        out, err = process.communicate(timeout=30)
        assert process.returncode == 0, err
        assert out.strip() == "stopped"
        assert err == ""
    finally:
        process.kill()


@pytest.fixture
def command(twell: Twell) -> Twell:
    """Runs ``twell serve``."""
    return functools.partial(twell, "serve")


def test_help(command: Twell) -> None:
    result = command("--help")
    assert result.returncode == 0 and "Usage" in result.stdout and "Example" in result.stdout


def test_bad_input_ends_in_one_line(command: Twell, folder: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for args, message in (
            ([str(folder), "--port", port], f"cannot listen on 127.0.0.1 port {port}: Address already in use"),
            ([str(folder), "--port", "0", "--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid"),
            ([str(tmp_path), "--port", "0"], f"{tmp_path} is no folder of a model: it has no config.json"),
            (["nowhere", "--port", "0"], "nowhere is no folder of a model"),
            ([str(folder), "--port", "0", "--host", "0.0.0.0"], "other machines can reach 0.0.0.0: give --api-key, or"),
            ([str(folder), "--port", "0", "--api-key", " "], "the API key is empty"),
            ([str(folder.parent), "--port", "0"], f"{folder.parent} is no folder of a model: it has no config.json; "),
            ([str(folder), "--port", "0", "--dtype", "int8"], "unknown dtype 'int8'"),
            ([str(folder), "--port", "0", "--device", "tpu"], "unknown device 'tpu'"),
        ):
            result = command(*args)
            assert result.returncode == 2
            assert result.stderr.startswith(f"twell: error: {message}"), result.stderr
            assert result.stderr.count("\n") == 1
    result = command("nowhere", "--drain", "inf")
    assert result.returncode == 2 and "--drain" in result.stderr


def test_a_missing_package_is_named(command: Twell, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith("twell.serve")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delattr(twell, "serve")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    result = command("somewhere")
    assert result.returncode == 2 and "pip install 'twell[serve]'" in result.stderr
    assert result.stderr.count("\n") == 1


def test_options_are_told(command: Twell, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--dense, --no-batching, --host, --name, --cache-tokens, --dtype, and models of transformers' own."""
    seen = []
    monkeypatch.setattr(serve, "run", lambda server, sock, drain: seen.append((server, sock)) or True)
    how = ["--dense", "--no-batching", "--host", "0.0.0.0", "--open", "--name", "me"]
    out = command(str(folder), "--port", "0", *how).stdout
    assert "sparse:   no layer of 2 (--dense)" in out
    assert "one at a time (--no-batching), up to 256 tokens" in out
    assert "warning:  other machines can reach this address" in out
    assert '"model": "me"' in out and "Authorization" not in out
    assert {layer.mlp.backend for layer in seen[0][0].model.model.layers} == {"reference"}
    assert "up to 256 tokens each, 512 in all" in command(str(folder), "--port", "0", "--cache-tokens", "512").stdout
    assert seen[1][1].getsockname()[0] == "127.0.0.1"
    out = command(str(folder), "--port", "0", "--no-batching", "--host", "0.0.0.0", "--api-key", "secret").stdout
    assert "warning" not in out and "secret" not in out
    assert '-H "Authorization: Bearer $TWELL_API_KEY"' in out
    monkeypatch.setattr(serve, "run", lambda *_: False)
    failed = command(str(folder), "--port", "0", "--no-batching")
    assert failed.returncode == 1 and "the model failed and could not start again" in failed.stderr
    monkeypatch.setattr(serve, "run", lambda server, sock, drain: seen.append((server, sock)) or True)

    torch.manual_seed(0)
    for activation, line in (
        ("relu", "sparse:   all 2 feed-forward layers"),
        ("silu", "sparse:   nothing is sparse: 2 dense: silu: call relufy_ first"),
    ):
        path = tmp_path / activation
        AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE, hidden_act=activation)).save_pretrained(path)
        AutoTokenizer.from_pretrained(folder).save_pretrained(path)
        how = ["--dtype", "bfloat16", *(["--no-batching"] if activation == "silu" else [])]
        assert line in command(str(path), "--port", "0", *how).stdout
        assert seen[-1][0].name == activation
        assert seen[-1][0].model.dtype == torch.bfloat16
