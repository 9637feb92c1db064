"""What the package's extras install, by the names that it is imported by."""

_MODELS = ("transformers", "tokenizers", "safetensors", "huggingface_hub", "accelerate")
EXTRAS = {
    "cli": ("typer", "rich"),
    "train": (*_MODELS, "pyarrow"),
    "eval": ("lm_eval",),
    "data": ("datasets",),
    "bench": ("pynvml",),
    "serve": (*_MODELS, "starlette", "uvicorn", "pydantic", "jinja2", "prometheus_client"),
    "vllm": ("vllm",),
}
