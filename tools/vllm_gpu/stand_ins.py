"""Replaces vLLM's compiled CUDA operations; the bundle has it as ``vllm/_C_stable_libtorch.py``.

Two norms are there as Triton kernels of one launch each, and two views of memory. The others have only a schema, for
modules that name them when imported: a call of one is an error.
"""

import torch
import triton
import triton.language as tl

_lib = torch.library.Library("_C", "FRAGMENT")
_cache = torch.library.Library("_C_cache_ops", "FRAGMENT")

_SCHEMAS = (
    "rms_norm(Tensor! result, Tensor input, Tensor? weight, float epsilon) -> ()",
    "fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor? weight, float epsilon) -> ()",
    "rotary_embedding(Tensor positions, Tensor! query, Tensor!? key, int head_size, Tensor cos_sin_cache, "
    "bool is_neox) -> ()",
    "silu_and_mul(Tensor! result, Tensor input) -> ()",
    "silu_and_mul_quant(Tensor! result, Tensor input, Tensor scale) -> ()",
    "silu_and_mul_per_block_quant(Tensor! out, Tensor input, Tensor! scales, int group_size, Tensor? scale_ub=None, "
    "bool is_scale_transposed=False) -> ()",
    "static_scaled_fp8_quant(Tensor! result, Tensor input, Tensor scale, int[]? group_shape=None) -> ()",
    "dynamic_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale) -> ()",
    "dynamic_per_token_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale, Tensor? scale_ub) -> ()",
    "per_token_group_fp8_quant(Tensor input, Tensor! output_q, Tensor! output_s, int group_size, float eps, "
    "float fp8_min, float fp8_max, bool scale_ue8m0, bool a=False, bool b=False) -> ()",
    "rms_norm_static_fp8_quant(Tensor! result, Tensor input, Tensor weight, Tensor scale, float epsilon) -> ()",
    "fused_add_rms_norm_static_fp8_quant(Tensor! result, Tensor input, Tensor! residual, Tensor weight, Tensor scale, "
    "float epsilon) -> ()",
    "rms_norm_dynamic_per_token_quant(Tensor! result, Tensor input, Tensor weight, Tensor! scale, float epsilon, "
    "Tensor? scale_ub, Tensor!? residual) -> ()",
    "rms_norm_per_block_quant(Tensor! result, Tensor input, Tensor weight, Tensor! scale, float epsilon, "
    "Tensor? scale_ub, Tensor!? residual, int group_size, bool is_scale_transposed) -> ()",
    "fused_qk_norm_rope(Tensor! qkv, int num_heads_q, int num_heads_k, int num_heads_v, int head_dim, float eps, "
    "Tensor q_weight, Tensor k_weight, Tensor cos_sin_cache, bool is_neox, Tensor position_ids) -> ()",
    "weak_ref_tensor(Tensor input) -> Tensor",
    "get_cuda_view_from_cpu_tensor(Tensor cpu_tensor) -> Tensor",
    "cutlass_scaled_mm_supports_fp4(int cap) -> bool",
    "cutlass_scaled_mm_supports_fp8(int cap) -> bool",
    "cutlass_scaled_mm_supports_block_fp8(int cap) -> bool",
)
for _schema in _SCHEMAS:
    _lib.define(_schema)
for _name in ("fp4", "fp8", "block_fp8"):
    _lib.impl(f"cutlass_scaled_mm_supports_{_name}", lambda cap: False, "CompositeExplicitAutograd")


@triton.jit
def _rms(x_ptr, r_ptr, w_ptr, y_ptr, D, eps, HAS_W: tl.constexpr, ADD: tl.constexpr, B: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, B)
    mask = i < D
    x = tl.load(x_ptr + row * D + i, mask=mask, other=0).to(tl.float32)
    if ADD:
        x += tl.load(r_ptr + row * D + i, mask=mask, other=0).to(tl.float32)
        tl.store(r_ptr + row * D + i, x.to(r_ptr.dtype.element_ty), mask=mask)
        x = x.to(r_ptr.dtype.element_ty).to(tl.float32)
    y = (x * tl.rsqrt(tl.sum(x * x) / D + eps)).to(y_ptr.dtype.element_ty)
    if HAS_W:
        y = y.to(tl.float32) * tl.load(w_ptr + i, mask=mask, other=0).to(tl.float32)
    tl.store(y_ptr + row * D + i, y.to(y_ptr.dtype.element_ty), mask=mask)


def _launch(x, residual, weight, y, epsilon):
    D = x.shape[-1]
    rows = x.numel() // D
    if not rows:
        return
    B = triton.next_power_of_2(D)
    r = x if residual is None else residual
    w = x if weight is None else weight
    warps = 4 if B <= 2048 else 8
    _rms[(rows,)](x, r, w, y, D, epsilon, weight is not None, residual is not None, B, num_warps=warps)


def _rms_norm(result, input, weight, epsilon):
    _launch(input.contiguous(), None, weight, result, epsilon)


def _fused_add_rms_norm(input, residual, weight, epsilon):
    assert input.is_contiguous() and residual.is_contiguous()
    _launch(input, residual, weight, input, epsilon)


def _same_memory(t, device):
    """A tensor over the same memory that does not own it, like those of inductor's CUDA graph trees."""
    storage = t.untyped_storage()
    memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), device, storage.nbytes())
    layout = {"size": tuple(t.shape), "stride": t.stride(), "storage_offset": t.storage_offset(), "dtype": t.dtype}
    return torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata({**layout, "device": device}, memory)


def _cuda_view(cpu_tensor):
    """Pinned memory as a GPU tensor at the same address; keeps the CPU tensor alive."""
    device = torch.device("cuda", torch.cuda.current_device())
    if not cpu_tensor.numel():
        return torch.empty(cpu_tensor.shape, dtype=cpu_tensor.dtype, device=device)
    assert cpu_tensor.is_pinned()
    view = _same_memory(cpu_tensor, device)
    view.kept = cpu_tensor
    assert view.data_ptr() == cpu_tensor.data_ptr() and view.is_cuda and view.dtype == cpu_tensor.dtype
    return view


def _weak_ref_tensor(input):
    return _same_memory(input, input.device) if input.numel() else input


_lib.impl("rms_norm", _rms_norm, "CUDA")
_lib.impl("fused_add_rms_norm", _fused_add_rms_norm, "CUDA")
_lib.impl("get_cuda_view_from_cpu_tensor", _cuda_view, "CPU")
_lib.impl("weak_ref_tensor", _weak_ref_tensor, "CUDA")
