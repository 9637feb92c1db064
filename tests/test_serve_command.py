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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from command_line import Twell

openai = pytest.importorskip("openai", reason="needs pip install 'twell[serve]' openai")
pytest.importorskip("uvicorn", reason="needs pip install 'twell[serve]'")
import torch
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient, WebSocketDenialResponse
from starlette.websockets import WebSocket
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from serving import SHAPE, request
from twell import workbench
from twell.hf.counts import COUNTS_FILE, NeuronCounts
from twell.workbench.serve import running
from twell.workbench.serve.guard import HandedOver

# -- the command --------------------------------------------------------------------------------------------


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
        path, data = words[1].removeprefix(url[1]), words[words.index("-d") + 1]
        status, answer = request(url[1], "POST", path, data.encode(), {"Content-Type": "application/json"})
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
    for module in [name for name in sys.modules if name.startswith("twell.workbench.serve")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delattr(workbench, "serve")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    result = command("somewhere")
    assert result.returncode == 2 and "pip install 'twell[serve]'" in result.stderr
    assert result.stderr.count("\n") == 1


def test_options_and_models(command: Twell, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--dense, --no-batching, --host, --name, --cache-tokens, --dtype, and models of transformers' own."""
    seen = []
    monkeypatch.setattr(running, "run", lambda server, sock, drain: seen.append((server, sock)) or True)
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
    monkeypatch.setattr(running, "run", lambda *_: False)
    failed = command(str(folder), "--port", "0", "--no-batching")
    assert failed.returncode == 1 and "the model failed and could not start again" in failed.stderr
    monkeypatch.setattr(running, "run", lambda server, sock, drain: seen.append((server, sock)) or True)

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


# -- vLLM in its place --------------------------------------------------------------------------------------


@pytest.fixture
def pretend(command: Twell, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, Any]]:
    """Runs the command where vLLM of a version is installed, and a GPU or none: gives its output, and what it runs."""
    monkeypatch.delenv("TWELL_API_KEY", raising=False)

    def run(*args: str, version: str | None = "0.32.1", gpu: bool = True) -> tuple[Any, Any]:
        ran: list[Any] = []
        with monkeypatch.context() as patch:
            patch.setattr("twell.vllm.installed_version", lambda: version)
            patch.setattr(torch.cuda, "is_available", lambda: gpu)
            patch.setattr("twell.workbench.cli.serve.load_model", lambda *_: ran.append("built in") or sys.exit(0))
            patch.setattr(os, "execve", lambda *given: ran.append(given) or sys.exit(0))
            result = command(*args)
        return result, ran[0] if ran else None

    return run


def test_vllm_gets_every_option(pretend: Any, folder: Path, tmp_path: Path) -> None:
    path = str(shutil.copytree(folder, tmp_path / "my-run" / "model"))
    said, (program, words, environment) = pretend(path, "--port", "0")
    assert said.stdout.startswith("engine:   vLLM 0.32.1 (--engine twell for the built-in server)\n")
    assert "warning" not in said.stdout
    port = re.search(r"address:  http://127\.0\.0\.1:(\d+)/v1, the model is called my-run\n$", said.stdout)
    assert port is not None
    assert program == sys.executable and words[:4] == [program, "-P", "-m", "vllm.entrypoints.openai.api_server"]
    assert dict(zip(words[4::2], words[5::2], strict=True)) == {
        "--model": path,
        "--served-model-name": "my-run",
        "--host": "127.0.0.1",
        "--port": port[1],
        "--dtype": "float32",
        "--shutdown-timeout": "30",
        "--middleware": "twell.workbench.serve.guard.HandedOver",
    }
    hosts = f"127.0.0.1,{socket.gethostname()}"
    assert environment == {**os.environ, "TWELL_HOSTS": hosts}

    NeuronCounts(fired=[], tokens=1).save(Path(path) / COUNTS_FILE)
    how = ["--host", "0.0.0.0", "--api-key", "secret", "--name", "me", "--dtype", "half", "--drain", "0.5"]
    said, (_, words, environment) = pretend(path, "--port", "0", *how, "--allow-host", "Box", "--device", "cuda")
    assert "warning" not in said.stdout and "secret" not in said.stdout + " ".join(words)
    options = dict(zip(words[4::2], words[5::2], strict=True))
    assert [options[f"--{name}"] for name in ("host", "served-model-name", "dtype")] == ["0.0.0.0", "me", "float16"]
    assert options["--shutdown-timeout"] == "1"
    assert environment["TWELL_API_KEY"] == environment["VLLM_API_KEY"] == "secret"
    assert environment["TWELL_HOSTS"] == f"0.0.0.0,{socket.gethostname()},Box"
    _, (_, _, environment) = pretend(path, "--port", "0", "--api-key", "sésame")
    sent = "Bearer sésame".encode().decode("latin-1").removeprefix("Bearer ")  # as a server reads the client's header
    assert environment["TWELL_API_KEY"] == "sésame" and environment["VLLM_API_KEY"] == sent  # vLLM compares with that
    assert "no key is asked for (--open)" in pretend(path, "--port", "0", "--host", "0.0.0.0", "--open")[0].stdout
    said, ran = pretend(path, "--port", "0", "--host", "0.0.0.0")
    assert ran is None and "other machines can reach 0.0.0.0" in said.stderr


def test_reasons_against_vllm(pretend: Any, folder: Path, tmp_path: Path) -> None:
    """--engine auto takes the built-in server then, and --engine vllm is an error."""
    config = json.loads((folder / "config.json").read_text())
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
    token = {**fp8, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": fp8, "input_activations": token}
    own = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
    changed = {
        "relu": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "relu"},
        "fp8": {"quantization_config": own},
        "int8": {"quantization_config": {"quant_method": "compressed-tensors", "format": "int-quantized"}},
    }
    for name, fields in changed.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**config, **fields}))
    path, both, auto = str(folder), ("auto", "vllm"), ("auto",)
    for args, where, why, engines in (
        ([path], {"version": "0.99.0"}, "twell's plugin was tested with vLLM 0.32.x", both),
        ([path, "--dense"], {}, "--dense is an option of the built-in server", both),
        ([path, "--no-batching"], {}, "--no-batching is an option", both),
        ([path, "--cache-tokens", "512"], {}, "--cache-tokens is an option", both),
        ([path, "--device", "cpu"], {}, "--device cpu is an option", both),
        ([path, "--dtype", "float64"], {}, "--dtype float64 is an option", both),
        ([str(tmp_path / "relu")], {}, "twell's plugin does not run LlamaForCausalLM", both),
        ([str(tmp_path / "fp8")], {}, "the model has FP8 weights", both),
        ([str(tmp_path / "int8")], {}, "the model is quantised", auto),
        ([path], {"gpu": False}, "torch sees no GPU", auto),
    ):
        for engine in both:
            said, ran = pretend(*args, "--port", "0", "--engine", engine, **where)
            if engine not in engines:
                assert ran[1][3] == "vllm.entrypoints.openai.api_server"
            elif engine == "auto":
                version = where.get("version", "0.32.1")
                assert ran == "built in" and said.stdout.startswith(f"engine:   built in, not vLLM {version}: {why}")
            else:
                assert ran is None and said.stderr.startswith(f"twell: error: vLLM cannot serve it so: {why}")
    said, ran = pretend(path, "--port", "0", "--engine", "twell")
    assert ran == "built in" and said.stdout == ""
    said, ran = pretend(path, "--port", "0", version=None)
    assert ran == "built in" and said.stdout == ""
    said, ran = pretend(path, "--port", "0", "--engine", "vllm", version=None)
    assert ran is None and "vLLM is not installed: pip install 'twell[vllm]'" in said.stderr
    said, ran = pretend(path, "--port", "0", "--engine", "tgi")
    assert ran is None and "unknown engine 'tgi': expected auto, vllm or twell" in said.stderr


def test_the_guard_in_front_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made without arguments, and asks web sockets, too: vLLM has a path of them."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await WebSocket(scope, receive, send).accept()
        else:
            await PlainTextResponse("fine")(scope, receive, send)

    def status(path: str = "/metrics", host: str = "localhost", **headers: str) -> int:
        return TestClient(guard).get(path, headers={"Host": host, **headers}).status_code

    def connects(host: str = "localhost", **headers: str) -> int:
        try:
            with TestClient(guard).websocket_connect("/v1/realtime", headers={"Host": host, **headers}):
                return 101
        except WebSocketDenialResponse as refused:
            return refused.status_code

    monkeypatch.setenv("TWELL_HOSTS", "127.0.0.1,Box")
    monkeypatch.delenv("TWELL_API_KEY", raising=False)
    guard = HandedOver(app)
    assert [status(host=host) for host in ("127.0.0.1:8000", "box", "elsewhere.example")] == [200, 200, 403]
    assert [connects(host=host) for host in ("127.0.0.1:8000", "box", "elsewhere.example")] == [101, 101, 403]
    monkeypatch.setenv("TWELL_API_KEY", "secret")
    guard = HandedOver(app)
    assert (status(), status("/health"), status(Authorization="Bearer secret")) == (401, 200, 200)
    assert (connects(), connects(Authorization="Bearer secret")) == (401, 101)
