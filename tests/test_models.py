"""The models of transformers that ``sparsify_`` covers: found by a walk, equal to dense, listed in docs/models.md."""

from __future__ import annotations

import copy
import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MllamaForCausalLM,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import twell
from twell import cpu
from twell.hf.classify import find_ffns, projection_names
from twell.hf.known import ACTIVATION_FIELDS, KNOWN, REFUSED
from twell.nn import sparse_ffns

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import covered_models
from covered_models import Architecture, walk

MIN_WORK = cpu.block.MIN_WORK  # as users have it: tests set it to 0
D, F, M = 256, 1024, 80  # F = 4 D, as models without a field for it have
SHAPE: dict[str, Any] = {
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 64,
    "max_position_embeddings": M,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
SMALL_HEADS = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}
SMALL_HEADS |= {"head_dim": 16, "num_key_value_heads": 4}
NOT_GIVEN = object()
OWN_SHAPES: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 16},
    "deepseek_v2": {**EXPERTS, **SMALL_HEADS},
    "deepseek_v3": {**EXPERTS, **SMALL_HEADS},
    "dots1": EXPERTS,
    "exaone_moe": EXPERTS,
    "falcon": {"head_dim": NOT_GIVEN},
    "glm4_moe": EXPERTS,
    "minicpm3": SMALL_HEADS,
    "mllama_text_model": {"cross_attention_layers": []},
    "gpt_neo": {"attention_types": [[["global"], 1]]},
    "gptj": {"rotary_dim": 16},
    "jamba": {"attn_layer_period": 1, "attn_layer_offset": 0},
    "llama4_text": {**EXPERTS, "intermediate_size_mlp": F},
    "nemotron_h": {"layer_types": ["mlp"]},
    "opt": {"ffn_dim": F, "word_embed_proj_dim": D},
    "qwen2_moe": {**EXPERTS, "mlp_only_layers": [0]},
    "qwen3_moe": {**EXPERTS, "mlp_only_layers": [0]},
    "qwen3_5_text": {"layer_types": ["full_attention"]},
    "qwen3_next": {**EXPERTS, "mlp_only_layers": [0], "layer_types": ["full_attention"]},
}
TWO_LAYERS: dict[str, dict[str, Any]] = {  # the second has what an architecture has beside its FFNs
    "gpt_neo": {"attention_types": [[["global"], 2]]},
    "jamba": {"attn_layer_period": 2},
    "llama4_text": {"interleave_moe_layer_step": 2},
    "nemotron_h": {"layer_types": ["mlp", "mamba"]},
    "qwen3_5_text": {"layer_types": ["full_attention", "linear_attention"]},
    "qwen3_next": {"layer_types": ["full_attention", "linear_attention"]},
}
ONE_FIELD_FOR_ALL = (
    "deepseek_v2, deepseek_v3, dots1, exaone_moe, glm4_moe, jamba, llama4_text, qwen2_moe, qwen3_5_text, "
)
ONE_FIELD_FOR_ALL += "qwen3_moe, qwen3_next"
NO_FIELD = "bloom, mpt"
ARCHITECTURES = {each.model_type: each for each in walk()}


COVERED = [name for name, each in ARCHITECTURES.items() if each.is_covered]
# Models of images and sounds stand here by their language models.
CONFIGS = {name: type(CONFIG_MAPPING[name]().get_text_config(decoder=True)) for name in COVERED}
TESTED = {config.model_type: config for config in CONFIGS.values()}
IDS = torch.randint(3, 64, (1, M), generator=torch.Generator().manual_seed(0))


def small_config(model_type: str, **changes: Any) -> Any:
    shape = SHAPE | OWN_SHAPES.get(model_type, {}) | changes
    return TESTED[model_type](**{field: value for field, value in shape.items() if value is not NOT_GIVEN})


def new_model(config: Any) -> Any:
    torch.manual_seed(0)
    make: Any = MllamaForCausalLM if config.model_type == "mllama_text_model" else AutoModelForCausalLM.from_config
    return make(config).eval()


def relu_model(model_type: str, **changes: Any) -> Any:
    """A model of one layer, ReLU or ReLU², in which few neurons can fire."""
    config = small_config(model_type, **changes)
    for field in ACTIVATION_FIELDS:
        if "relu" not in getattr(config, field, "relu"):
            setattr(config, field, "relu")
    model = new_model(config)
    if not any(hasattr(config, field) for field in ACTIVATION_FIELDS):
        twell.relufy_(model)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(0, 0.1)
        for *_, ffn in find_ffns(model):
            first = getattr(ffn, projection_names(ffn)[0])
            for p in first.parameters():
                p[torch.arange(len(p)) % 32 > 0] = 0
    return model


def logits(model: Any) -> Tensor:
    return model(IDS, use_cache=False).logits  # a model of one layer without attention can have no cache


@pytest.fixture
def sparse_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The neurons added up for each block of tokens that has run sparsely since, by the thresholds that users have."""
    runs: list[int] = []
    add_up = cpu.rows.weighted_neurons
    monkeypatch.setattr(cpu.block, "MIN_WORK", MIN_WORK)
    monkeypatch.setattr(cpu.rows, "weighted_neurons", lambda *a: (runs.append(len(a[4])), add_up(*a))[1])
    return runs


# ---------------------------------------------------------------------------------------------------------
# The walk
# ---------------------------------------------------------------------------------------------------------


def uncovered(found: list[Architecture]) -> list[str]:
    return [each.model_type for each in found if each.is_relu and not each.is_covered and not each.why_not]


def test_every_relu_decoder_is_covered_or_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(ARCHITECTURES.values())
    assert uncovered(found) == [], "cover them in hf/known.py, or refuse them there with the reason"
    relu = {each.model_type for each in found if each.is_relu}
    assert relu >= {
        "arcee",
        "bitnet",
        "ctrl",
        "jais2",
        "nanochat",
        "nemotron",
        "nemotron_h",
        "opt",
        "persimmon",
        "rwkv",
    }
    assert "llama" not in relu and len(found) > 150
    for name in ("bitnet.modeling_bitnet.BitNetMLP", "ctrl.modeling_ctrl.EncoderLayer"):
        monkeypatch.delitem(REFUSED, f"transformers.models.{name}")
    monkeypatch.delitem(KNOWN, "transformers.models.opt.modeling_opt.OPTDecoderLayer")
    assert uncovered(walk()) == ["bitnet", "ctrl", "opt"]  # one that is new would be seen


def test_the_page_of_models_is_up_to_date() -> None:
    pinned = (ROOT / "constraints.txt").read_text()
    if f"transformers=={transformers.__version__}\n" not in pinned:
        pytest.skip("the page is of another transformers")
    page = (ROOT / "docs" / "models.md").read_text()
    assert covered_models.updated(page) == page, "run python tools/covered_models.py docs/models.md"


# ---------------------------------------------------------------------------------------------------------
# Equality
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", TESTED)
def test_sparse_equals_dense(model_type: str, sparse_runs: list[int]) -> None:
    """Within twice the error of the dense model, by the same model in float64; and back."""
    model = relu_model(model_type)
    keys = list(model.state_dict())
    with torch.no_grad():
        exact, dense = logits(copy.deepcopy(model).double()), logits(model)
        report = twell.sparsify_(model)
        assert report.n_sparse == len(report.rows) == 1, report
        assert list(model.state_dict()) == keys
        sparse_runs.clear()
        sparse = logits(model)
        assert sum(sparse_runs) > M  # of M * F
        assert error(sparse, exact) <= 2 * error(dense, exact) < 0.01 * exact.norm()
        twell.desparsify_(model)
        assert torch.equal(logits(model), dense) and list(model.state_dict()) == keys


def error(found: Tensor, exact: Tensor) -> Tensor:
    return (found.double() - exact).norm()


@pytest.mark.parametrize("model_type", ["bloom", "gptj", "starcoder2"])
def test_blocks_that_stay_keep_their_dropout(model_type: str, sparse_runs: list[int]) -> None:
    fields = {"bloom": "hidden_dropout", "gptj": "resid_pdrop", "starcoder2": "residual_dropout"}
    model = relu_model(model_type, **{fields[model_type]: 0.5}).train()
    torch.manual_seed(1)
    dense = logits(model)
    assert twell.sparsify_(model).n_sparse == 1
    torch.manual_seed(1)
    torch.testing.assert_close(logits(model), dense, rtol=1e-4, atol=1e-4)
    assert sparse_runs and not torch.equal(logits(model), logits(model))


def test_falcon_gets_its_linears_back_with_the_weights_of_now() -> None:
    model = relu_model("falcon")
    dense: Any = model.transformer.h[0].mlp
    twell.sparsify_(model)
    new = {name: t + 1 for name, t in model.state_dict().items()}
    model.load_state_dict(new, assign=True)
    twell.desparsify_(model)
    assert model.transformer.h[0].mlp is dense and type(dense.dense_h_to_4h).__name__ == "FalconLinear"
    assert all(torch.equal(t, new[name]) for name, t in model.state_dict().items())
    dense.dense_h_to_4h.register_forward_hook(lambda *_: None)
    [row] = twell.sparsify_(model).rows
    assert row.kind == "called" and "FalconLinear" in row.why


def test_a_bloom_that_reads_its_weight_in_parts_is_left_alone() -> None:
    model = relu_model("bloom", pretraining_tp=2, slow_but_exact=True)
    assert "slow_but_exact reads" in twell.sparsify_(model).rows[0].why


@pytest.mark.parametrize("model_type", ["bitnet", "ctrl", "gpt2", "phi3", "reformer", "rwkv", "xlm"])
def test_refused_models_are_told_why(model_type: str) -> None:
    own: dict[str, dict[str, Any]] = {
        "reformer": {
            "num_hidden_layers": NOT_GIVEN,
            "attn_layers": ["local"],
            "is_decoder": True,
            "axial_pos_embds": False,
        },
        "xlm": {"n_langs": 1},
    }
    shape = SHAPE | {"n_embd": D, "dff": F} | own.get(model_type, {})
    config = CONFIG_MAPPING[model_type](**{field: value for field, value in shape.items() if value is not NOT_GIVEN})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    for report in (twell.sparsify_(model), twell.relufy_(model)):
        assert ARCHITECTURES[model_type].why_not in report.rows[0].why and not report.changed


@pytest.mark.parametrize("model_type", TESTED)
def test_a_relufied_model_loads_as_it_was_saved_or_the_report_says_no(model_type: str, tmp_path: Path) -> None:
    model = new_model(small_config(model_type, num_hidden_layers=2, **TWO_LAYERS.get(model_type, {})))
    is_kept = "call relufy_ after every from_pretrained" not in str(twell.relufy_(model))
    assert is_kept is (model_type not in f"{ONE_FIELD_FOR_ALL}, {NO_FIELD}".split(", "))
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(logits(type(model).from_pretrained(tmp_path).eval()), logits(model)) is is_kept


def test_the_page_names_the_models_whose_relu_is_not_saved() -> None:
    page = " ".join((ROOT / "docs" / "models.md").read_text().split())
    assert f"({ONE_FIELD_FOR_ALL})" in page and f"({NO_FIELD})" in page


@pytest.mark.parametrize("text", ["llama", "gemma3_text", "qwen2_moe"])
def test_of_a_composite_model_the_language_model_gets_relu(text: str) -> None:
    vision = CLIPVisionConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    config = LlavaConfig(text_config=small_config(text, num_hidden_layers=2), vision_config=vision)
    with torch.device("meta"):
        report = twell.relufy_(LlavaForConditionalGeneration(config))
    assert [".language_model." in row.layer for row in report.rows] == [bool(row.became) for row in report.rows]
    assert len(report.skipped) == 1 and len(report.changed) >= 2 and vision.hidden_act == "quick_gelu"
    is_kept = "relu" in config.text_config.to_dict().values()
    assert is_kept is ("from_pretrained" not in str(report)) is (text != "qwen2_moe")


@pytest.mark.parametrize("model_type", ["gpt_neox", "falcon", "bloom"])
def test_layers_with_names_of_their_own_copy_compile_and_train(model_type: str, sparse_runs: list[int]) -> None:
    model = relu_model(model_type).double()
    logits(model).square().sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    twell.sparsify_(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    twin = torch.load(file, weights_only=False)
    logits(twin).square().sum().backward()
    torch.testing.assert_close({name: p.grad for name, p in twin.named_parameters()}, expected)
    twell.desparsify_(twin)
    assert not list(sparse_ffns(twin)) and len(list(sparse_ffns(model))) == 1
    [(name, _)] = sparse_ffns(model)
    torch._dynamo.reset()
    block, x = model.get_submodule(name), torch.randn(1, M, D, dtype=torch.float64)
    args = (x, x) if model_type == "bloom" else (x,)
    torch.testing.assert_close(torch.compile(block, fullgraph=True, backend="aot_eager")(*args), block(*args))
