# Every target sets up what it needs in .venv, from python3 (3.11 or newer), gcc and this folder, and only when
# something changed. Stamps in .venv say what is done.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --quiet
SOURCES := $(shell find freetoken -name '*.pyx' -o -name '*.pxd' -o -name '*.h')

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: demo test llama bench sanitize sanitized twin twinned lint stubs clean help

demo: $(VENV)/.built  ## generate text with the small model that comes along
	$(VENV)/bin/ft generate --prompt "It was a dark night, and" --temperature 0.6 --seed 3

test: $(VENV)/.built  ## run the tests (ARGS="-k name" is passed on to pytest)
	$(PY) -m pytest $(ARGS)

llama: $(VENV)/.llama  ## compare GGUF files with llama.cpp, which is built for it in minutes (ARGS as above)
	$(PY) -m pytest tests/integration/test_llama_cpp.py $(ARGS)

bench: $(VENV)/.built  ## measure, without the tests (ARGS is passed on to pytest)
	@$(PY) -c "import torch, time; t = time.perf_counter(); import freetoken; \
	print(f'import freetoken: {time.perf_counter() - t:.3f} s beyond torch')"
	$(PY) -m pytest benchmarks --benchmark-only $(ARGS)

# A second build, in build/sanitized; ARGS as above.
SANITIZERS := -fsanitize=address,undefined -fno-sanitize-recover=undefined
SANITIZED := import sys, freetoken, pytest; assert "sanitized" in freetoken.__file__; sys.exit(pytest.main(sys.argv[1:]))

sanitized: $(VENV)/.built
	@CFLAGS="$(SANITIZERS)" LDFLAGS="$(SANITIZERS)" PYTHONWARNINGS=ignore \
	$(PY) setup.py --quiet build --build-lib build/sanitized --build-temp build/sanitized.tmp

sanitize: sanitized  ## run the tests of compiled modules under AddressSanitizer and UBSan
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 \
	PYTHONPATH=build/sanitized $(PY) -P -c '$(SANITIZED)' -p no:cacheprovider -q --capture=sys \
	tests/kernels tests/checkpoint/test_strips.py tests/rows/test_table.py tests/duties/test_layer.py --deselect tests/kernels/test_portable.py $(ARGS)

# A third one, in build/twin, whose matrix unit is plain C: the tests of amx on a processor without one.
TWIN := import sys, freetoken, pytest; assert "twin" in freetoken.__file__; sys.exit(pytest.main(sys.argv[1:]))

twinned: $(VENV)/.built
	@CFLAGS="-DFT_AMX_TWIN -Itests/support" PYTHONWARNINGS=ignore \
	$(PY) setup.py --quiet build --build-lib build/twin --build-temp build/twin.tmp

twin: twinned  ## run the tests of amx with its instructions replaced by C
	PYTHONPATH=build/twin $(PY) -P -c '$(TWIN)' -p no:cacheprovider -q --capture=sys \
	tests/kernels/test_experts.py tests/kernels/test_isa.py -k "amx or isa" $(ARGS)

lint: $(VENV)/.linters  ## check style, types and stubs
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" cython-lint freetoken
	$(PY) -m pytest tests/test_typing.py

stubs: $(VENV)/.linters  ## check types, and the .pyi files against the compiled modules
	$(PY) -m pytest tests/test_typing.py

clean:  ## remove what was built; .venv keeps what was downloaded
	rm -rf build dist *.egg-info .benchmarks .mypy_cache .pytest_cache .ruff_cache $(VENV)/.built
	find freetoken tests benchmarks -name '*.so' -delete -o -name '*.py[co]' -delete 2>/dev/null || true

help:  ## say what each target does
	@sed -n 's/^\([a-z]*\):.*##  *\(.*\)/\1\t\2/p' Makefile | expand -t 10

# The venv, with what the build itself needs (pyproject.toml says from which version on; pip checks it below).
$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"{sys.executable} is too old: 3.11 or newer is needed, name one with make PYTHON=...")'
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "the venv module is missing: install python3-venv"; exit 1; }
	@$(PYTHON) -c 'import pathlib, sys, sysconfig; sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())' || \
	{ echo "Python.h is missing: install python3-dev"; exit 1; }
	@command -v gcc > /dev/null || { echo "gcc is missing: install it"; exit 1; }
	@echo "installing PyTorch into $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --upgrade Cython setuptools "$(TORCH)"
	@touch $@

$(VENV)/.built: $(VENV)/.torch setup.py setup.cfg pyproject.toml $(SOURCES)
	@echo "building freetoken"
	@PYTHONWARNINGS=ignore $(PIP) install --no-build-isolation --check-build-dependencies --editable ".[models,test]"
	@touch $@

$(VENV)/.linters: $(VENV)/.built
	@$(PIP) install "freetoken[lint]"
	@touch $@

# llama.cpp for any processor that has AVX2, as pip keeps what it has built; its default is for this one only.
$(VENV)/.llama: $(VENV)/.built
	@command -v g++ > /dev/null || { echo "g++ is missing: install it"; exit 1; }
	@echo "building llama.cpp"
	@CMAKE_ARGS="-DGGML_NATIVE=OFF -DLLAVA_BUILD=OFF" $(PIP) install "freetoken[llama]"
	@touch $@
