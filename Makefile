# make             everything that a clone can do: sets up .venv, compiles the kernels for this machine and for browsers,
#                  and says what to do next. `make build` is the same; after a change in csrc/ it compiles what changed.
#                  With an NVIDIA card there are kernels for that card, too; SKBUILD_CMAKE_DEFINE=DIFFBIT_CUDA=ON compiles
#                  them without one (docs/gpu.md)
# make demo        trains, quantizes, exports and runs two small models, and writes out/demo/report.html
# make demo-smollm2   a published model from a PyPI wheel, made differential, quantized, and talked to (examples/smollm2.sh);
#                  QUICK=1 rounds to nearest and chats within two minutes
# make c           build/c/runtime: libdiffbit.so and libdiffbit.a, which run artifacts from C, and diffbit-c (docs/c.md)
# make test        lint, types and the quick tests
# make test-all    all tests (`bash .ci/run all` also installs what some of them need and skip without)
# make develop     sets up .venv with what the tests need
# make arm64       an ARM Python with ONNX Runtime, with which the tests run whole artifacts on qemu-aarch64
# make windows     ONNX Runtime's DLL, with which the tests run an artifact on wine
# make fuzz        reads 50,000 damaged files, writes texts under 20,000 schemas and grammars, and reads other programs'
#                  metadata (tests/fuzz); `make test-all` a part of each
# make kill        kills commands before every step that changes the disk (tests/kill); `make test-all` before some of them
# make soak        the server for two hours under a load that changes (tests/soak)
# make null-test   compares SmolLM2 with its differential conversion through every path, to the bit (about 20 minutes);
#                  MODEL=... compares another plain model
# make bench-kernels   time, bandwidth and ratios of the kernels beside ONNX Runtime's (benchmarks/kernels.py)
# make models      restores the models that studies measured on from this repository's history: examples/{nano,nano_1k,bitnet}
# make accuracy    renews the tables of research/weights and research/attention, on the models of examples/nano and nano_1k,
#                  on 18 small models that it trains, and on SmolLM2; about four hours of one core
# make wheels      dist/: wheels with the library inside for any Linux on x86-64 and on ARM, of which one is cross-compiled
#                  (g++-aarch64-linux-gnu), for Windows, macOS and musl, which ziglang compiles, and the source
#                  distribution (docs/packages.md)
# make lowest      runs the quick tests with the oldest releases of Python packages that pyproject.toml allows (build/lowest;
#                  torch's of that time brings 3 GB of CUDA)
# make sbom        out/sbom.json: the packages that diffbit[cpu] installs, in CycloneDX (docs/packages.md)
# make docs        out/site: docs/ as a website; `python -m http.server -d out/site` serves it
# make clean       removes .venv and all that was made
#
# Each target sets up .venv first. That takes Python 3.11 or later and make; with a C++17 compiler the native library is
# built as well.

PYTHON ?= python3
BIN := .venv/bin
# Scripts that need only Python's standard library. One prepares .venv; the other tells what a command does, and that it is
# at work when it is silent for long
HELPER := $(or $(wildcard $(BIN)/python),$(PYTHON))
SAY := $(HELPER) deploy/say.py
PREPARE := $(HELPER) deploy/environment.py
EXTRAS := cpu lab serve structured hub web
# Modules are compiled when they are first imported: pip would compile all of torch, most of which is never used. So each
# process may keep what it compiled, or the next one spends seconds on it again
unexport PYTHONDONTWRITEBYTECODE
# Each worker takes tests that follow one another, which share what their modules make, until another has none left
WORKERS := -n logical --maxprocesses 4 --dist worksteal
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell nproc 2>/dev/null || echo 2)

# Targets that install share one environment
.NOTPARALLEL:
.DEFAULT_GOAL := build
.PHONY: build ready develop demo demo-smollm2 test test-all fuzz soak kill lint arm64 windows null-test bench-kernels models accuracy \
    c wheels lowest sbom docs clean

build: ready
	@$(SAY) "" $(BIN)/python -m diffbit.apps.web.build
	@echo 'Next: . .venv/bin/activate, then diffbit --help. `make demo` shows the whole workflow.'

ready:
	@$(PREPARE) $(EXTRAS)

develop:
	@$(PREPARE) $(EXTRAS) dev docs

demo: ready
	@echo 'the whole workflow with two small models: about 3 minutes on 2 cores'
	@PATH="$(abspath $(BIN)):$$PATH" $(SAY) "" bash examples/demo.sh out/demo
	@echo 'Next: open out/demo/report.html in a browser. Then . .venv/bin/activate, and'
	@echo '  diffbit run out/demo/diff_v1-onnx "def "                    continues a text'
	@echo '  diffbit chat hf:HuggingFaceTB/SmolLM2-135M-Instruct         talks with a published model (270 MB)'

demo-smollm2: ready
	@PATH="$(abspath $(BIN)):$$PATH" $(SAY) "" bash examples/smollm2.sh $(if $(QUICK),--quick) out/smollm2
	@echo 'Next: . .venv/bin/activate, then diffbit chat out/smollm2/diff-onnx'

test: lint
	@$(SAY) "the quick tests: about 6 minutes on 2 cores" $(BIN)/python -m pytest $(WORKERS) -m "not slow"
	@echo 'All passed. Next: `make test-all` runs the slow tests, too.'

test-all: lint
	@$(SAY) "all tests: about an hour on 2 cores" $(BIN)/python -m pytest $(WORKERS)
	@echo 'All passed.'

fuzz: develop
	@$(SAY) "50,000 damaged files: some hours" $(BIN)/python -m tests.fuzz.fuzz 50000
	@$(SAY) "every field of every family's config" $(BIN)/python -m tests.fuzz.metadata
	@$(SAY) "20,000 schemas and grammars: half an hour" $(BIN)/python -m tests.fuzz.schemas 20000

soak: develop
	@$(SAY) "a server under load: two hours" $(BIN)/python -m tests.soak.soak

kill: develop
	@$(SAY) "commands that are killed at every step: some hours" \
	    $(BIN)/python -m pytest $(WORKERS) -p tests.every_point tests/kill

MODEL = out/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
null-test: develop
	@test -e "$(MODEL)" || PATH="$(abspath $(BIN)):$$PATH" bash examples/smollm2.sh --fetch out/smollm2
	@$(SAY) "npm packages of tests/apps/web: a minute" \
	    npm ci --silent --no-audit --no-fund --ignore-scripts --prefix tests/apps/web
	@DIFFBIT_NULL_MODEL="$(abspath $(MODEL))" $(SAY) "a model and its conversion through every path: about 20 minutes" \
	    $(BIN)/python -m pytest -q tests/apps/convert/test_null.py

lint: develop
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(SAY) "types (mypy): a minute the first time" $(BIN)/mypy

arm64: ready
	@$(SAY) "an ARM Python for qemu: a minute, and the time that the download takes" \
	    bash tests/native/arm64.sh build/native/arm64 $(BIN)/python

windows: ready
	@$(SAY) "ONNX Runtime for Windows: the time that the download takes" \
	    bash tests/native/windows.sh build/native/windows $(BIN)/python

c:
	@$(SAY) "libdiffbit: some minutes" sh -ec '\
	    cmake -S csrc -B build/c -DDIFFBIT_C=ON -DDIFFBIT_CUDA=OFF; \
	    cmake --build build/c --parallel --target diffbit_static diffbit-c'
	@echo 'Next: build/c/runtime/diffbit-c runtime/nano "def main("'

bench-kernels: ready
	@$(SAY) "the kernels beside ONNX Runtime's: some minutes" $(BIN)/python benchmarks/kernels.py

models:
	@$(SAY) "the models of examples/: a minute" bash examples/restore.sh

accuracy: ready
	@$(SAY) "low-bit weights: an hour" $(BIN)/python benchmarks/accuracy.py --json out/accuracy.json --markdown
	@$(SAY) "low-bit attention: half an hour" $(BIN)/python benchmarks/attention.py --json out/attention.json --markdown
	@$(SAY) "18 models, trained and measured: two hours" \
	    $(BIN)/python benchmarks/runs.py --work out/runs --json out/runs.json --markdown
	@$(SAY) "calibration: half an hour" $(BIN)/python research/weights/calibration.py --work out/smollm2 --markdown

wheels: develop
	@$(SAY) "" $(BIN)/python -m diffbit.apps.web.build
	@SKBUILD_CMAKE_DEFINE='DIFFBIT_CUDA=ON;DIFFBIT_CUDA_ARCHITECTURES=all' $(SAY) "the wheel for x86-64: some minutes" \
	    bash deploy/wheel.sh x86_64 dist $(BIN)/python
	@$(SAY) "the wheel for ARM: some minutes" bash deploy/wheel.sh aarch64 dist $(BIN)/python
	@for system in win_amd64 win_arm64 macosx_11_0_arm64 macosx_11_0_x86_64 musllinux_1_2_x86_64 musllinux_1_2_aarch64; do \
	    $(SAY) "the wheel for $$system: some minutes" bash deploy/wheel.sh $$system dist $(BIN)/python || exit; done
	@$(BIN)/python -c 'from scikit_build_core.build import build_sdist; build_sdist("dist")'
	@ls -l dist

sbom:
	@$(SAY) "two environments in build/: a minute or two" sh -ec '\
	    $(PYTHON) -m venv build/sbom; \
	    build/sbom/bin/python -m pip install --quiet --constraint constraints.txt ".[cpu]"; \
	    $(PYTHON) -m venv build/cyclonedx; \
	    build/cyclonedx/bin/python -m pip install --quiet cyclonedx-bom==7.5.0'
	@mkdir -p out
	@build/cyclonedx/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible -o out/sbom.json \
	    build/sbom/bin/python
	@echo 'out/sbom.json'

empty :=
space := $(empty) $(empty)
comma := ,
lowest:
	@$(SAY) "an environment of old releases in build/lowest: some minutes, 4 GB" sh -ec '\
	    $(PYTHON) -m venv build/uv; \
	    build/uv/bin/python -m pip install --quiet uv; \
	    build/uv/bin/uv venv --quiet --clear build/lowest; \
	    build/uv/bin/uv pip install --quiet --python build/lowest --resolution lowest-direct \
	        --editable ".[$(subst $(space),$(comma),$(EXTRAS)),dev]"'
	@$(SAY) "the quick tests with them: about 6 minutes on 2 cores" build/lowest/bin/python -m pytest $(WORKERS) -m "not slow"

docs: develop
	@NO_MKDOCS_2_WARNING=1 $(SAY) "out/site: half a minute" $(BIN)/mkdocs build --strict
	@echo 'Next: python -m http.server -d out/site'

clean:
	rm -rf .venv build out .mypy_cache .pytest_cache .ruff_cache .hypothesis
