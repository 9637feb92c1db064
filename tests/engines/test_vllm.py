"""The sparse models in the real vLLM, on the CPU: ``make test-vllm``. Elsewhere all of it is skipped."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib import request
from urllib.error import HTTPError

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM: make test-vllm", allow_module_level=True)

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # some virtual machines trap on AMX
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions for LLM.apply_model in other processes

import torch
import vllm
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.worker.cpu_worker import CPUWorker

import twell
from twell.hf import (
    LlamaSparseReluConfig,
    LlamaSparseReluForCausalLM,
    Qwen2SparseReluConfig,
    Qwen2SparseReluForCausalLM,
)
from twell.hf.counts import COUNTS_FILE, NeuronCounts
from twell.nn import sparse_ffns
from twell.ops import registered
from twell.train.data import SAMPLE, read_texts
from twell.train.tokenizer import train_bpe

D, F, LAYERS, CONTEXT = 512, 2560, 2, 256  # one token takes the sparse code of the CPU
NEW_TOKENS, CHUNK = 16, 128
SHAPE: dict[str, Any] = {
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 320,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.04,
}
WIDE = {"hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 1, "num_attention_heads": 16}
PROMPTS = [[7], [3, 5, 8, 13, 21], [i * 37 % 256 for i in range(100)], [i * 11 % 256 for i in range(CONTEXT - 20)]]
ASKED = [[(i * 7 + k) % 256 for i in range(1 + k * (CONTEXT - NEW_TOKENS - 1) // 15)] for k in range(16)]  # by clients
ARCHITECTURES = {  # architecture: its configuration, its class, and what else
    "LlamaSparseReluForCausalLM": (LlamaSparseReluConfig, LlamaSparseReluForCausalLM, {"mlp_bias": True}),
    "Qwen2SparseReluForCausalLM": (Qwen2SparseReluConfig, Qwen2SparseReluForCausalLM, {}),
    "SparseLlamaForCausalLM": (LlamaSparseReluConfig, LlamaSparseReluForCausalLM, {"sparsity_gated_mlp": False}),
}
MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "compiled": {},
    "tensor parallel": {"tensor_parallel_size": 2},
}


@torch.no_grad()
def save_model(path: Path, architecture: str = "LlamaSparseReluForCausalLM", seed: int = 0, **fields: Any) -> Path:
    """A random model of whose neurons a token fires a few percent, and counts that say so."""
    config_class, model_class, more = ARCHITECTURES[architecture]
    torch.manual_seed(seed)
    config = config_class(**{**SHAPE, **more, **fields})
    model: Any = model_class(config).eval()
    std = config.initializer_range
    model.model.embed_tokens.weight.normal_()
    model.model.embed_tokens.weight[:, 0] = config.hidden_size**0.5 / 2  # a channel that all tokens have
    for _, ffn in sparse_ffns(model):
        first, *_ = linears = [getattr(ffn, name) for name in ffn.projections]
        first.weight[:, 0] = -4 * std
        for linear in linears:
            if linear.bias is not None:
                linear.bias.normal_(std=std)
    model.generation_config.eos_token_id = None
    model.save_pretrained(path)
    config_file = path / "config.json"
    config_file.write_text(json.dumps({**json.loads(config_file.read_text()), "architectures": [architecture]}))
    fired = torch.arange(config.intermediate_size) % 20
    NeuronCounts(fired=[fired.roll(i) for i in range(config.num_hidden_layers)], tokens=1000).save(path / COUNTS_FILE)
    return path


@torch.no_grad()
def expected(path: Path, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    """What transformers generates, where its layers run sparsely."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    for stats in model(torch.tensor([PROMPTS[2]]), output_sparsity=True).sparsity:
        assert 0.002 < float(stats.counts.double().mean()) / int(stats.tokens) < 0.2
    how = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
    given = [torch.tensor([ids]) for ids in prompts]
    return [model.generate(p, attention_mask=torch.ones_like(p), **how)[0, p.shape[1] :].tolist() for p in given]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[list[int]]]]:
    """Folders, and what transformers generates: vLLM changes model classes, for the rest of a process."""
    folder = tmp_path_factory.mktemp("models")
    paths = {name: save_model(folder / name, name) for name in ARCHITECTURES}
    paths |= {f"wide {seed}": save_model(folder / f"wide {seed}", seed=seed, **WIDE) for seed in (1, 2)}
    found = {name: (path, expected(path)) for name, path in paths.items()}
    served = paths["LlamaSparseReluForCausalLM"]
    train_bpe(["".join(read_texts(SAMPLE))[:50_000]], SHAPE["vocab_size"]).save_pretrained(served)
    return found | {"served": (served, expected(served, ASKED))}


@pytest.fixture
def llama(models: dict[str, Any], tmp_path: Path) -> tuple[Path, list[list[int]]]:
    """A copy of a model, which a test may change, and its tokens."""
    path, tokens = models["LlamaSparseReluForCausalLM"]
    return shutil.copytree(path, tmp_path / "model"), tokens


@contextlib.contextmanager
def running(path: Path, **how: Any) -> Iterator[LLM]:
    llm = None
    try:
        how = {"dtype": "float32", "max_num_seqs": len(PROMPTS), "max_num_batched_tokens": CHUNK, **how}
        llm = LLM(str(path), skip_tokenizer_init=True, max_model_len=CONTEXT, **how)
        yield llm
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


def generated(llm: LLM) -> list[list[int]]:
    """The longest alone, in chunks and then a token at a time; then all together, when its prefix is cached."""
    llm.reset_prefix_cache()  # its keys and values are of the weights before
    how = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    prompts: list[Any] = [{"prompt_token_ids": ids} for ids in PROMPTS]
    answers = [*llm.generate(prompts[-1:], how), *llm.generate(prompts, how)]
    alone, *others = [list(answer.outputs[0].token_ids) for answer in answers]
    assert alone == others[-1]
    assert answers[-1].num_cached_tokens
    return others


# ---------------------------------------------------------------------------------------------------------
# Same tokens, plans, reloads
# ---------------------------------------------------------------------------------------------------------


# For LLM.apply_model, which sends them to other processes.


def plans(model: Any) -> list[tuple[int, int, float]]:
    return [(f._plan_eager.order.numel(), f.plan.n_neurons, f.plan.mean_active) for _, f in sparse_ffns(model)]


def frozen(model: Any) -> list[tuple[int, float]]:
    return [(t.data_ptr(), t.double().sum().item()) for _, ffn in sparse_ffns(model) for t in ffn.frozen._tensors]


def is_frozen_as_it_should_be(model: Any) -> bool:
    before = frozen(model)
    twell.refresh_(model)
    return frozen(model) == before


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tokens_are_those_of_transformers(
    architecture: str, mode: str, models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, tokens = models[architecture]
    infer, sizes = registered.infer, set()  # what the operation calls in compiled code

    def counted(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        sizes.add(x.shape[0])
        return infer(x, *rest)

    monkeypatch.setattr(registered, "infer", counted)
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # layers have their plans' tensors on the device, as on a GPU
    with running(path, **MODES[mode]) as llm:
        assert generated(llm) == tokens
        found = llm.apply_model(plans)
    assert mode != "compiled" or {1, len(PROMPTS), CHUNK} <= sizes
    counts, n_shares = NeuronCounts.load(path / COUNTS_FILE), MODES[mode].get("tensor_parallel_size", 1)
    assert len(found) == n_shares
    for rank, shares in enumerate(found):
        own = slice(rank * F // n_shares, (rank + 1) * F // n_shares)
        assert [widths for *widths, _ in shares] == [[F // n_shares] * 2] * LAYERS
        assert [mean for *_, mean in shares] == pytest.approx([int(c[own].sum()) / 1000 for c in counts.fired])


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_a_reload_rewrites_what_is_frozen(mode: str, models: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """At a width where layers freeze an int8 gate, which decides for one token which neurons fire."""
    infer, n_kept = registered.infer, set()

    def counted(*given: Any) -> torch.Tensor:
        n_kept.add(len(given[-1]))
        return infer(*given)

    monkeypatch.setattr(registered, "infer", counted)
    (first, tokens), (second, others) = models["wide 1"], models["wide 2"]
    assert tokens != others
    of_first, of_second = (load_file(path / "model.safetensors") for path in (first, second))

    def load_in_parts(model: Any) -> None:
        """As training does that sends its weights bit by bit."""
        initialize_layerwise_reload(model)
        for i in range(3):
            model.load_weights(iter(list(of_first.items())[i::3]))
        finalize_layerwise_reload(model, model.model_config)

    def load_ffns(model: Any) -> None:
        model.load_weights((name, weight) for name, weight in of_second.items() if ".mlp." in name)

    def write_ffns(model: Any) -> int:
        for name, ffn in sparse_ffns(model):
            for key, parameter in ffn.named_parameters():
                parameter.data.copy_(of_first[f"{name}.{key}"])
        return twell.refresh_(model)

    measure, at_measuring = CPUWorker.determine_available_memory, []

    def measured(worker: Any) -> int:
        at_measuring.append(frozen(worker.get_model()))
        return measure(worker)

    monkeypatch.setattr(CPUWorker, "determine_available_memory", measured)
    with running(first, **MODES[mode]) as llm:
        (before,) = llm.apply_model(frozen)
        assert at_measuring == [before]  # vLLM's cache leaves room for it
        assert before or torch.backends.cpu.get_cpu_capability() != "AVX512"
        assert generated(llm) == tokens

        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(second)})
        (after,) = llm.apply_model(frozen)
        assert [address for address, _ in after] == [address for address, _ in before]
        assert after != before or not before
        assert llm.apply_model(is_frozen_as_it_should_be) == [True]
        assert generated(llm) == others

        llm.apply_model(load_in_parts)
        assert llm.apply_model(is_frozen_as_it_should_be) == [True]
        assert generated(llm) == tokens

        llm.apply_model(load_ffns)
        assert llm.apply_model(is_frozen_as_it_should_be) == [True]
        assert generated(llm) != tokens
        assert llm.apply_model(write_ffns) == [1]
        assert generated(llm) == tokens
    assert mode != "compiled" or n_kept == {len(before)}  # compiled code takes what is frozen, at any time


def test_twell_serve_hands_over(models: dict[str, Any], tmp_path: Path) -> None:
    """To vLLM's server, which answers many clients that have the key."""
    path, tokens = models["served"]
    command = [sys.executable, "-m", "twell", "serve", str(path), "--engine", "vllm", "--port", "0"]
    command += ["--name", "sparse", "--api-key", "secret"]
    log = tmp_path / "log"
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)

    def answer(path: str, asked: Any = None, key: str = "secret") -> Any:
        """What the server says: JSON, or the status of an error."""
        address = re.search(r"address:  (http\S+)/v1, the model is called sparse", log.read_text())
        if address is None:
            raise OSError
        body = None if asked is None else json.dumps(asked).encode()
        head = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        try:
            with request.urlopen(request.Request(address[1] + path, body, head)) as said:
                return json.loads(said.read() or "{}")
        except HTTPError as error:
            return error.code

    try:
        for _ in range(180):
            with contextlib.suppress(OSError):
                answer("/health", key="")
                break
            assert server.poll() is None, log.read_text()[-5000:]
            time.sleep(1)
        assert log.read_text().startswith(f"engine:   vLLM {vllm.__version__} (--engine twell for the built-in server)")
        asked = {"model": "sparse", "max_tokens": NEW_TOKENS, "temperature": 0}
        asked |= {"ignore_eos": True, "return_token_ids": True}
        with ThreadPoolExecutor(16) as clients:
            answers = clients.map(lambda prompt: answer("/v1/completions", {**asked, "prompt": prompt}), ASKED)
            assert [given["choices"][0]["token_ids"] for given in answers] == tokens
        for closed in ("/v1/models", "/metrics", "/tokenize"):
            assert answer(closed, key="wrong") == 401
    finally:
        server.terminate()
        assert server.wait(60) == 0


# ---------------------------------------------------------------------------------------------------------
# What is refused
# ---------------------------------------------------------------------------------------------------------


def test_lora_on_ffns_is_refused(llama: tuple[Path, list[list[int]]], tmp_path: Path) -> None:
    path, tokens = llama
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    how = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["gate_proj"], "bias": "none"}
    (adapter / "adapter_config.json").write_text(json.dumps(how))
    name = "base_model.model.model.layers.0.mlp.gate_proj"
    weights = {f"{name}.lora_A.weight": torch.ones(8, D), f"{name}.lora_B.weight": torch.ones(F, 8)}
    save_file(weights, adapter / "adapter_model.safetensors")
    for target in (None, ["q_proj", "down_proj"], ["gate_up_proj"]):
        with (
            pytest.raises(ValueError, match=r"LoRA cannot act on model.layers.0.mlp.*Merge the adapter"),
            running(path, enforce_eager=True, enable_lora=True, lora_target_modules=target),
        ):
            pass
    with running(path, enforce_eager=True, enable_lora=True, lora_target_modules=["q_proj", "v_proj"]) as llm:
        assert generated(llm) == tokens
        with pytest.raises(ValueError, match=r"expected target modules .* received .*gate_proj"):  # vLLM's own words
            llm.generate({"prompt_token_ids": [1]}, lora_request=LoRARequest("adapter", 1, str(adapter)))


def quantised(path: Path, ignore: list[str], **fields: Any) -> Path:
    """Its configuration says so."""
    linear = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    token = {**linear, "strategy": "token", "dynamic": True}
    for part, changes in fields.items():
        {"weights": linear, "input_activations": token}[part].update(changes)
    groups = {"group_0": {"targets": ["Linear"], "weights": linear, "input_activations": token}}
    how = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "config_groups": groups}
    how |= {"format": "float-quantized" if fields else "int-quantized", "ignore": ignore}
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": how}))
    return path


def test_quantised_ffns_are_refused(llama: tuple[Path, list[list[int]]]) -> None:
    path, tokens = llama
    quantised(path, ["lm_head"])
    with (
        pytest.raises(ValueError, match=r"compressed-tensors would quantise model.layers.0.mlp.*exclude them"),
        running(path, enforce_eager=True),
    ):
        pass
    with running(quantised(path, ["lm_head", "re:.*mlp.*", "re:.*self_attn.*"]), enforce_eager=True) as llm:
        assert generated(llm) == tokens


def test_fp8_weights_of_our_own_are_refused(llama: tuple[Path, list[list[int]]]) -> None:
    fp8 = {"type": "float"}
    path = quantised(llama[0], ["lm_head"], weights=fp8, input_activations=fp8)
    with pytest.raises(ValueError, match="FP8 weights, which twell does not run in vLLM"), running(path):
        pass


def test_sleep_mode_is_refused() -> None:
    config = SimpleNamespace(hf_config=None, enable_sleep_mode=True)
    with pytest.raises(ValueError, match="sleep mode would lose the plans"):
        twell.vllm.SparseForCausalLM(vllm_config=SimpleNamespace(model_config=config))


def test_counts_of_another_model_are_refused(llama: tuple[Path, list[list[int]]]) -> None:
    path = llama[0]
    NeuronCounts(fired=[torch.zeros(F, dtype=torch.int64)], tokens=10).save(path / COUNTS_FILE)
    with pytest.raises(ValueError, match="belongs to another model"), running(path, enforce_eager=True):
        pass


def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert twell.vllm.SparseForCausalLM.__name__ == "SparseForCausalLM"
    monkeypatch.setattr(vllm, "__version__", "0.99.1")
    with pytest.raises(ImportError, match=r"tested with vLLM 0.32.x .*this is 0.99.1"):
        _ = twell.vllm.SparseForCausalLM


def test_without_counts_a_gpu_gets_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from twell.vllm import model as module

    said: list[str] = []
    monkeypatch.setattr(module.logger, "warning_once", lambda text, *args: said.append(text % args))
    model: Any = nn.Module()
    model.ffn, model.config = twell.GatedSparseFFN(16, 32), SimpleNamespace(name_or_path="some/model")
    module.plan_(model, None, torch.device("cpu"))
    assert said == []
    module.plan_(model, None, torch.device("cuda"))
    assert len(said) == 1
    assert "some/model has no neuron_counts.npz beside it" in said[0]
    assert model.ffn.plan is None
    assert not model.ffn._plans_itself
