"""FP8 weights in files: our own, compressed-tensors' and torchao's, in Python and on the command line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel, TorchAoConfig
from transformers.utils import is_compressed_tensors_available

import twell
from command_line import Twell
from twell.fp8 import E4M3, Fp8Linear, emulated
from twell.fp8 import linear as fp8
from twell.fp8.compressed import describe, is_rowwise_fp8, place_fp8_
from twell.hf import LlamaSparseReluConfig, LlamaSparseReluModel, Qwen2SparseReluConfig
from twell.nn import FP8_WEIGHTS, sparse_ffns
from twell.reference import Fp8
from twell.train.tokenizer import train_bpe
from twell.workbench import doctor

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
FFN_LAYERS = [f"model.layers.{i}.mlp.{name}" for i in range(2) for name in PROJECTIONS]
needs_library = pytest.mark.skipif(not is_compressed_tensors_available(), reason="needs compressed-tensors")


@pytest.fixture(autouse=True)
def for_inference(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(doctor, "bf16_problem", lambda: None)
    with torch.no_grad():
        yield


def make(config: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def quantised(config: Any) -> PreTrainedModel:
    model = make(config)
    twell.sparsify_(model)
    assert len(twell.quantize_(model, emulate=True).layers) == 2
    return model


def llama_config() -> LlamaConfig:
    return LlamaConfig(**SHAPE, hidden_act="relu")


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def logits(model: Any) -> Tensor:
    with emulated(model):
        return model(torch.arange(12).view(2, 6)).logits


def assert_same_state(a: nn.Module, b: nn.Module) -> None:
    states = a.state_dict(), b.state_dict()
    assert states[0].keys() == states[1].keys()
    for name, t in states[0].items():
        other = states[1][name]
        assert t.dtype == other.dtype and t.contiguous().view(torch.uint8).equal(other.contiguous().view(torch.uint8))


# -- our own model types -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("config", [LlamaSparseReluConfig, Qwen2SparseReluConfig])
def test_our_types_come_back_bit_for_bit(tmp_path: Path, config: type, bias: bool) -> None:
    model = quantised(config(**SHAPE, mlp_bias=bias))
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in FFN_LAYERS:
        assert tensors[f"{name}.weight"].dtype == E4M3
        assert tensors[f"{name}.weight_scale"].shape == (len(tensors[f"{name}.weight"]), 1)
    loaded = load(tmp_path)
    assert_same_state(model, loaded)
    layers = {name for name, module in loaded.named_modules() if isinstance(module, Fp8Linear)}
    assert layers == set(FFN_LAYERS)
    assert not any(p.requires_grad for name in layers for p in loaded.get_submodule(name).parameters())
    assert logits(loaded).equal(logits(model))
    assert [ffn.why_called() for _, ffn in sparse_ffns(loaded)] == [FP8_WEIGHTS] * 2
    again = tmp_path / "again"
    loaded.save_pretrained(again)
    assert config_of(again) == config_of(tmp_path) and "fp8_quantization" not in config_of(again)


def test_a_dequantised_model_is_saved_as_a_plain_one(tmp_path: Path) -> None:
    quantised(LlamaSparseReluConfig(**SHAPE)).save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert twell.dequantize_(loaded) == 6 and loaded.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    loaded.save_pretrained(tmp_path / "plain")
    assert "quantization_config" not in config_of(tmp_path / "plain")
    assert_same_state(load(tmp_path / "plain"), loaded)


def test_another_dtype_changes_only_other_weights(tmp_path: Path) -> None:
    model = quantised(LlamaSparseReluConfig(**SHAPE))
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float16)
    assert loaded.dtype == torch.float16
    mine, theirs = (m.model.layers[0].mlp.gate_proj for m in (model, loaded))
    assert theirs.weight.dtype == E4M3 and theirs.weight_scale.equal(mine.weight_scale)


def test_a_model_without_its_head_finds_its_layers(tmp_path: Path) -> None:
    model = quantised(LlamaSparseReluConfig(**SHAPE))
    model.save_pretrained(tmp_path)
    assert_same_state(LlamaSparseReluModel.from_pretrained(tmp_path), model.model)
    model.model.save_pretrained(tmp_path / "base")
    assert_same_state(LlamaSparseReluModel.from_pretrained(tmp_path / "base"), model.model)


def test_attention_in_fp8_is_loaded_too(tmp_path: Path) -> None:
    model = quantised(LlamaSparseReluConfig(**SHAPE))
    attention = model.model.layers[1].self_attn
    attention.o_proj = Fp8Linear.from_linear(attention.o_proj, emulate=True)
    model.config.fp8_quantization = describe(model)
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert_same_state(model, loaded)
    assert logits(loaded).equal(logits(model))
    assert twell.dequantize_(loaded) == 7


@pytest.mark.parametrize("lost", ["weight", "weight_scale"])
def test_lost_and_misshapen_weights_are_refused(tmp_path: Path, lost: str) -> None:
    quantised(LlamaSparseReluConfig(**SHAPE)).save_pretrained(tmp_path)
    file, name = tmp_path / "model.safetensors", f"{FFN_LAYERS[0]}.{lost}"
    tensors = load_file(file)
    part = tensors.pop(name)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"lacks 1 of its model's weights: {name}"):
        load(tmp_path)
    save_file({**tensors, name: part[:16].contiguous()}, file, metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match=r"(?i)mismatch"):
        load(tmp_path)


def test_schemes_are_told_apart() -> None:
    good = describe(quantised(llama_config()))
    assert is_rowwise_fp8(good)
    for key, value in (("format", "int-quantized"), ("quant_method", "fp8"), ("config_groups", {}), ("format", None)):
        assert not is_rowwise_fp8({**good, key: value})
    group = good["config_groups"]["group_0"]
    for part, key, value in (
        ("weights", "strategy", "tensor"),
        ("weights", "num_bits", 4),
        ("weights", "type", "int"),
        ("input_activations", "dynamic", False),
        ("input_activations", "strategy", "tensor"),
    ):
        other = {**good, "config_groups": {"a": {**group, part: {**group[part], key: value}}}}
        assert not is_rowwise_fp8(other), (part, key)
    assert not is_rowwise_fp8({**good, "config_groups": {"a": {**group, "input_activations": None}}})
    for odd in (None, "fp8", 3, [], {"quant_method": "compressed-tensors"}):
        assert not is_rowwise_fp8(odd)


def test_regular_expressions_name_layers_as_the_library_has_it() -> None:
    model = make(llama_config())
    quantization = describe(model)
    quantization["config_groups"]["group_0"]["targets"] = [r"re:.*mlp\..*_proj$", "model.layers.0.self_attn.k_proj"]
    quantization["ignore"] = ["lm_head", r"re:model\.layers\.1\..*down"]
    place_fp8_(model, quantization)
    placed = {name for name, module in model.named_modules() if isinstance(module, Fp8Linear)}
    assert placed == {*FFN_LAYERS, "model.layers.0.self_attn.k_proj"} - {"model.layers.1.mlp.down_proj"}


# -- compressed-tensors --------------------------------------------------------------------------------------------


def written_by_the_library(folder: Path, targets: list[str], preset: str = "FP8_DYNAMIC") -> Path:
    """A Llama quantised, compressed and saved by compressed-tensors."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, apply_quantization_config

    model = make(llama_config())
    apply_quantization_config(model, QuantizationConfig(config_groups={preset: targets}, ignore=["lm_head"]))
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            largest = module.weight.abs().float()
            largest = largest.amax(1, keepdim=True) if len(module.weight_scale) > 1 else largest.amax().view(1)
            module.weight_scale.copy_(largest / 448)
            module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return folder


@pytest.fixture(scope="module")
def library_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("compressed_tensors")
    torch.manual_seed(0)
    with torch.no_grad():
        return written_by_the_library(tmp_path_factory.mktemp("compressed"), [r"re:.*mlp\..*_proj$"])


def assert_taken_over(model: Any, folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name in FFN_LAYERS:
        layer = model.get_submodule(name)
        assert type(layer) is Fp8Linear
        assert layer.weight.view(torch.uint8).equal(tensors[f"{name}.weight"].view(torch.uint8))
        assert layer.weight_scale.equal(tensors[f"{name}.weight_scale"].float())


@pytest.mark.parametrize("after_a_forward", [False, True])
def test_the_librarys_layers_are_taken_over(library_folder: Path, tmp_path: Path, after_a_forward: bool) -> None:
    model, theirs = load(library_folder), load(library_folder)
    expected = logits(theirs)
    if after_a_forward:  # which decompresses weights
        logits(model)
        assert model.model.layers[0].mlp.gate_proj.weight.dtype == torch.bfloat16
    report = twell.sparsify_(model)
    assert len(report.changed) == 2 and all(row.why == FP8_WEIGHTS for row in report.rows)
    assert_taken_over(model, library_folder)
    # The library multiplies rounded values in bfloat16, and rounds its sums once more than we do.
    assert float((logits(model) - expected).norm() / expected.norm()) < 0.02
    model.save_pretrained(tmp_path)
    assert is_rowwise_fp8(config_of(tmp_path)["quantization_config"])
    again = load(tmp_path)
    twell.sparsify_(again)
    assert_taken_over(again, library_folder)


def test_models_to_dequantise_or_train_are_not_taken_over(library_folder: Path) -> None:
    from transformers import CompressedTensorsConfig

    how = CompressedTensorsConfig(dequantize=True)
    with pytest.warns(UserWarning, match="already has a `quantization_config`"):
        model = AutoModelForCausalLM.from_pretrained(library_folder, quantization_config=how)
    twell.sparsify_(model)
    assert type(model.model.layers[0].mlp.gate_proj) is nn.Linear
    assert len(twell.quantize_(model, emulate=True).layers) == 2
    assert is_rowwise_fp8(model.config.quantization_config)
    model = load(library_folder).train()
    twell.sparsify_(model)
    assert type(model.model.layers[0].mlp.gate_proj) is nn.Linear


@pytest.mark.parametrize("forward", ["before", "after", "never"])
@pytest.mark.parametrize("quantize", [False, True])
def test_attention_is_taken_over_too(tmp_path: Path, quantize: bool, forward: str) -> None:
    """The library makes its layers plain in the first forward, and then no configuration fits them and ours."""
    pytest.importorskip("compressed_tensors")
    folder = written_by_the_library(tmp_path / "all", ["Linear"])
    model, theirs = load(folder), load(folder)
    expected = logits(theirs)
    if forward == "before":
        logits(model)
    twell.sparsify_(model)
    assert_taken_over(model, folder)
    if quantize:
        twell.quantize_(model, emulate=True)
    assert all(type(model.model.layers[i].self_attn.q_proj) is Fp8Linear for i in range(2))
    if forward == "after":
        logits(model)
    model.save_pretrained(tmp_path / "again")
    assert config_of(tmp_path / "again")["quantization_config"]["ignore"] == ["lm_head"]
    again = load(tmp_path / "again")
    twell.sparsify_(again)
    for m in (model, again):
        assert float((logits(m) - expected).norm() / expected.norm()) < 0.02


@pytest.mark.parametrize("targets", [[r"re:.*mlp\..*_proj$"], ["Linear"]])
@pytest.mark.parametrize("before", ["nothing", "forward", "sparsify_"])
def test_the_librarys_layers_are_dequantised(tmp_path: Path, targets: list[str], before: str) -> None:
    pytest.importorskip("compressed_tensors")
    model = load(written_by_the_library(tmp_path / "all", targets))
    expected = logits(load(tmp_path / "all"))
    if before == "forward":  # which decompresses weights
        logits(model)
    elif before == "sparsify_":
        twell.sparsify_(model)
    assert twell.dequantize_(model) == (6 if len(targets[0]) > 6 else 14)
    assert not any("scale" in name for name in model.state_dict())
    values = logits(model)
    assert 0 < float((values - expected).norm() / expected.norm()) < 0.05  # x is no longer rounded
    model.save_pretrained(tmp_path / "plain")
    assert "quantization_config" not in config_of(tmp_path / "plain")
    assert logits(load(tmp_path / "plain")).equal(values)
    assert model.float().dtype == torch.float32  # which transformers refuses for a quantised model


def test_attention_in_fp8_is_recorded_by_quantize(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    model = load(written_by_the_library(tmp_path / "attention", [r"re:.*self_attn\..*_proj$"]))
    twell.sparsify_(model)
    assert len(twell.quantize_(model, emulate=True).layers) == 2
    model.save_pretrained(tmp_path / "both")
    assert config_of(tmp_path / "both")["quantization_config"]["ignore"] == ["lm_head"]
    loaded = load(tmp_path / "both")
    twell.sparsify_(loaded)
    for m in (loaded, model):
        for name in FFN_LAYERS:  # the library keeps scales in the model's dtype
            m.get_submodule(name).weight_scale = nn.Parameter(m.get_submodule(name).weight_scale.bfloat16().float())
    assert logits(loaded).equal(logits(model))


def test_layers_of_another_scheme_keep_the_configuration(tmp_path: Path) -> None:
    """They are in the FFNs' checkpoint, whose configuration then describes both."""
    compressed = pytest.importorskip("compressed_tensors.quantization")
    model = load(written_by_the_library(tmp_path, ["Linear"]))
    scheme = compressed.preset_name_to_scheme("FP8", ["Linear"])  # a scale for all rows
    model.model.layers[0].self_attn.q_proj.quantization_scheme = scheme
    stated = model.config.quantization_config
    twell.sparsify_(model)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(ValueError, match="already quantised by compressed-tensors"):
        twell.quantize_(model, emulate=True)
    with pytest.raises(ValueError, match=r"1 layers are quantised in another way \(model\..*\.0\.self_attn\.q_proj is"):
        twell.dequantize_(model)
    assert model.config.quantization_config is stated and before.keys() == model.state_dict().keys()
    assert all(type(model.get_submodule(name)) is Fp8Linear for name in FFN_LAYERS)


def test_other_schemes_are_left_to_the_library(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    model = load(written_by_the_library(tmp_path, [r"re:.*mlp\..*_proj$"], preset="FP8"))  # a scale for all rows
    twell.sparsify_(model)
    assert not any(isinstance(module, Fp8Linear) for module in model.modules())


def test_hooks_on_the_librarys_layers_keep_them(library_folder: Path) -> None:
    layer = load(library_folder).model.layers[0].mlp.gate_proj
    assert fp8.is_foreign(layer)
    layer.register_forward_hook(lambda module, args, y: y)
    assert not fp8.is_foreign(layer) and fp8.take_over(layer) is None


@needs_library
@pytest.mark.parametrize("config", [llama_config, lambda: LlamaSparseReluConfig(**SHAPE)])
def test_the_library_reads_what_we_write(tmp_path: Path, config: Callable[[], Any]) -> None:
    from compressed_tensors.quantization import QuantizationConfig

    model = quantised(config())
    for name in FFN_LAYERS:  # the library has scales in the model's dtype
        scale = model.get_submodule(name).weight_scale
        scale.copy_(scale.bfloat16())
    model.save_pretrained(tmp_path)
    told = config_of(tmp_path)["quantization_config"]
    parsed = QuantizationConfig.model_validate(told)
    assert parsed.format == "float-quantized" and parsed.config_groups["group_0"].weights.strategy == "channel"
    if model.config.model_type == "llama":
        theirs = load(tmp_path)
        quantised_by_them = {n for n, module in theirs.named_modules() if hasattr(module, "quantization_scheme")}
        assert quantised_by_them == set(FFN_LAYERS)
        expected = logits(theirs)
        assert float((logits(model) - expected).norm() / expected.norm()) < 0.02
    else:
        config_file = tmp_path / "config.json"
        renamed = {**config_of(tmp_path), "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
        config_file.write_text(json.dumps({**renamed, "hidden_act": "relu"}))
        theirs = load(tmp_path)
        twell.sparsify_(theirs)
        assert_same_state(theirs, model)


def test_transformers_own_fp8_layers_are_taken_over() -> None:
    pytest.importorskip("transformers.integrations.compressed_tensors")
    from transformers.integrations import compressed_tensors

    if not hasattr(compressed_tensors, "CompressedTensorsFP8Linear"):
        pytest.skip("this transformers has none")
    ours = Fp8Linear.from_linear(nn.Linear(32, 48), emulate=True)
    theirs = compressed_tensors.CompressedTensorsFP8Linear(32, 48, has_bias=True)
    theirs.weight, theirs.bias = ours.weight, ours.bias
    theirs.weight_scale = nn.Parameter(ours.weight_scale.t().contiguous(), requires_grad=False)
    taken = fp8.take_over(theirs)
    assert taken is not None
    assert_same_state(taken, ours)


# -- torchao -------------------------------------------------------------------------------------------------------


def with_torchao(
    monkeypatch: pytest.MonkeyPatch, granularity: str = "PerRow", ffns_alone: bool = True, sparse_before: bool = False
) -> Any:
    torchao = pytest.importorskip("torchao.quantization")
    monkeypatch.setattr("torchao.quantization.quant_api._check_hardware_support", lambda granularity: None)
    model = make(llama_config())
    if sparse_before:
        twell.sparsify_(model)
    how = torchao.Float8DynamicActivationFloat8WeightConfig(granularity=getattr(torchao, granularity)())
    torchao.quantize_(model, how, lambda m, name: isinstance(m, nn.Linear) and ("mlp" in name or not ffns_alone))
    return model


def test_torchaos_layers_are_taken_over(monkeypatch: Any, tmp_path: Path) -> None:
    model = with_torchao(monkeypatch)
    weights = {name: model.get_submodule(name).weight for name in FFN_LAYERS}
    report = twell.sparsify_(model)
    assert len(report.changed) == 2 and all(row.why == FP8_WEIGHTS for row in report.rows)
    for name, weight in weights.items():
        layer = model.get_submodule(name)
        assert layer.weight.view(torch.uint8).equal(weight.qdata.view(torch.uint8))
        assert layer.weight_scale.equal(weight.scale) and layer.weight.dtype == E4M3
    model.save_pretrained(tmp_path)
    assert is_rowwise_fp8(config_of(tmp_path)["quantization_config"])


def test_torchaos_layers_in_sparse_ffns_are_taken_over(monkeypatch: Any) -> None:
    model = with_torchao(monkeypatch, sparse_before=True)
    (_, ffn), *_ = sparse_ffns(model)
    weight = ffn.gate_proj.weight
    assert "Float8Tensor" in str(ffn.why_called())
    report = twell.sparsify_(model)
    assert [row.became for row in report.rows] == ["GatedSparseFFN, its FP8 weights taken over"] * 2
    assert ffn.gate_proj.weight.view(torch.uint8).equal(weight.qdata.view(torch.uint8))


def test_torchaos_other_schemes_are_left_to_it(monkeypatch: Any) -> None:
    model = with_torchao(monkeypatch, "PerTensor")
    twell.sparsify_(model)
    assert not any(isinstance(module, Fp8Linear) for module in model.modules())


def test_torchaos_attention_is_taken_over_too(monkeypatch: Any, tmp_path: Path) -> None:
    model = with_torchao(monkeypatch, ffns_alone=False)
    twell.sparsify_(model)
    assert isinstance(model.model.layers[0].self_attn.q_proj, Fp8Linear)
    model.save_pretrained(tmp_path / "fp8")
    assert config_of(tmp_path / "fp8")["quantization_config"]["ignore"] == ["lm_head"]
    assert twell.dequantize_(model) == 14
    model.save_pretrained(tmp_path / "plain")
    assert logits(load(tmp_path / "plain")).equal(logits(model))


@pytest.mark.parametrize("ffns_alone", [True, False])
def test_torchaos_checkpoints_run_and_cannot_be_saved(monkeypatch: Any, tmp_path: Path, ffns_alone: bool) -> None:
    """transformers has no way back to torchao's files, and tries it for every model that came from them."""
    torchao = pytest.importorskip("torchao.quantization")
    monkeypatch.setattr("torchao.quantization.quant_api._check_hardware_support", lambda granularity: None)
    make(llama_config()).save_pretrained(tmp_path / "plain")
    how = torchao.Float8DynamicActivationFloat8WeightConfig(granularity=torchao.PerRow())
    config = TorchAoConfig(how, modules_to_not_convert=["lm_head", *[".*self_attn"] * ffns_alone])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=config)
    theirs.save_pretrained(tmp_path / "ao")
    model = load(tmp_path / "ao")
    twell.sparsify_(model)
    assert all(type(model.get_submodule(name)) is Fp8Linear for name in FFN_LAYERS)
    with pytest.raises(NotImplementedError):
        model.save_pretrained(tmp_path / "sparse")
    assert twell.dequantize_(model) == (6 if ffns_alone else 14)
    with pytest.raises(NotImplementedError):
        model.save_pretrained(tmp_path / "dense")
    new = make(model.config)
    new.load_state_dict(model.state_dict())
    new.save_pretrained(tmp_path / "new")
    assert logits(load(tmp_path / "new")).equal(logits(model))


def test_torchaos_layers_become_ours_by_quantize(monkeypatch: Any) -> None:
    model = with_torchao(monkeypatch)
    weight = model.model.layers[0].mlp.gate_proj.weight
    layer = twell.GatedSparseFFN(32, 80, dtype=torch.bfloat16)
    for name in PROJECTIONS:
        setattr(layer, name, model.model.layers[0].mlp.get_submodule(name))
    assert "Float8Tensor" in str(layer.why_called())
    assert twell.quantize_(layer, emulate=True).layers == ("",)
    q, scale = layer.gate_proj.fp8()
    assert Fp8(q, scale).to(torch.float64).equal(Fp8(weight.qdata, weight.scale[:, 0]).to(torch.float64))
    assert twell.dequantize_(layer) == 3 and layer.gate_proj.weight.dtype == torch.bfloat16


# -- the command line ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own") / "model"
    with torch.no_grad():
        quantised(LlamaSparseReluConfig(**SHAPE)).save_pretrained(folder)
    train_bpe(["hello world " * 50], 300).save_pretrained(folder)
    (folder.parent / "text.txt").write_text("hello world " * 50)
    return folder


COMMANDS = {
    "generate": ("generate", "MODEL", "--prompt", "hello", "--device", "cpu"),
    "eval": ("eval", "MODEL", "--text", "TEXT"),
    "analyze": ("analyze", "MODEL", "--text", "TEXT"),
    "calibrate": ("calibrate", "MODEL", "--text", "TEXT"),
    "serve": ("serve", "MODEL", "--device", "cpu"),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs them")
def test_commands_refuse_fp8_on_a_cpu(twell: Twell, own_folder: Path, command: str) -> None:
    words = {"MODEL": str(own_folder), "TEXT": str(own_folder.parent / "text.txt")}
    result = twell(*(words.get(arg, arg) for arg in COMMANDS[command]))
    assert result.returncode == 2, result.stdout + result.stderr
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"twell: error: {own_folder} has FP8 weights: "), result.stderr
    assert "compute capability 8.9" in lines[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs them")
def test_a_llama_of_the_library_is_refused_on_a_cpu_as_well(twell: Twell, library_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(library_folder, tmp_path / "model")
    train_bpe(["hello world " * 50], 300).save_pretrained(tmp_path / "model")
    result = twell("generate", str(tmp_path / "model"), "--prompt", "hello", "--device", "cpu")
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1].startswith(f"twell: error: {tmp_path / 'model'} has FP8 weights: ")


@pytest.mark.parametrize("kind", ["own", "llama"])
def test_the_command(twell: Twell, kind: str, tmp_path: Path) -> None:
    config = LlamaSparseReluConfig(**SHAPE) if kind == "own" else llama_config()
    model = make(config)
    model.save_pretrained(tmp_path / "model")
    train_bpe(["hello world " * 50], 300).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "neuron_counts.npz").write_bytes(b"counts")
    counted = twell("quantize", str(tmp_path / "model"), "--out", str(tmp_path / "out"))
    assert counted.returncode == 2 and "neuron_counts.npz" in counted.stderr and not (tmp_path / "out").exists()
    (tmp_path / "model" / "neuron_counts.npz").unlink()
    result = twell("quantize", str(tmp_path / "model"), "--out", str(tmp_path / "out"), "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["layers"] == [f"model.layers.{i}.mlp" for i in range(2)]
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {f"{name}.weight" for name in FFN_LAYERS} == {k for k, t in tensors.items() if t.dtype == E4M3}
    assert is_rowwise_fp8(config_of(tmp_path / "out")["quantization_config"])
    again = twell("quantize", str(tmp_path / "model"), "--out", str(tmp_path / "out"))
    assert again.returncode == 2 and "is not empty" in again.stderr
    if kind == "llama":
        make(LlamaConfig(**SHAPE, hidden_act="silu")).save_pretrained(tmp_path / "model")
        refused = twell("quantize", str(tmp_path / "model"), "--out", str(tmp_path / "other"))
        assert refused.returncode == 2 and "has no feed-forward layers to quantize: " in refused.stderr, refused.stderr


def test_quantize_keeps_the_counts_of_the_shipped_model(
    twell: Twell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = twell("quantize", "sample", "--out", "q")
    assert result.returncode == 0 and (tmp_path / "q" / "neuron_counts.npz").is_file(), result.stderr


def test_conversions_refuse_fp8(twell: Twell, own_folder: Path, tmp_path: Path) -> None:
    result = twell("convert", str(own_folder), "--out", str(tmp_path / "out"))
    assert result.returncode == 2 and "has FP8 weights, which cannot be trained" in result.stderr


@pytest.mark.parametrize("which", ["own", "library"])
def test_the_doctor_sees_fp8_layers(own_folder: Path, which: str, request: pytest.FixtureRequest) -> None:
    folder = own_folder if which == "own" else request.getfixturevalue("library_folder")
    rows = doctor.plans(str(folder))
    assert [(row.runs, row.plan) for row in rows] == [(f"called: {FP8_WEIGHTS}", "")] * 2


def test_a_missing_library_is_reported_in_one_line(twell: Twell, monkeypatch: Any, tmp_path: Path) -> None:
    model = make(llama_config())
    model.config.quantization_config = describe(model)
    model.save_pretrained(tmp_path)
    monkeypatch.setattr("transformers.utils.quantization_config.is_compressed_tensors_available", lambda: False)
    result = twell("generate", str(tmp_path), "--prompt", "hello", "--device", "cpu")
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1
    assert f"{tmp_path} needs another package: compressed-tensors" in result.stderr


def test_configurations_keep_other_quantisers_words() -> None:
    other = {"quant_method": "gptq", "bits": 4}
    config = LlamaSparseReluConfig(**SHAPE, quantization_config=other)
    assert config.fp8_quantization is None and config.to_dict()["quantization_config"] == other
    plain = AutoConfig.for_model("llama_sparse_relu", **SHAPE)
    assert plain.fp8_quantization is None and "quantization_config" not in plain.to_dict()
