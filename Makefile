# Every target prepares what it needs: the active Python if it has torch, or else .venv, and the
# compiled core; demo, build and wheel need no torch. On a bare machine python3 with its headers and
# venv, and g++, must be there. See .ci/environment.py, which names what is not.
#
#   make demo       replay two recorded programs under four allocators, with a picture
#   make test       every test that needs no GPU and is not long, the build included
#   make test-long  those that are: endurance, C++ under sanitizers, machine code, trainings, several
#                   processes, a browser, times of large inputs
#   make test-models  the tests of the libraries whose models it trains, a release after the other
#   make test-versions  the tests of hooks and checkpoints with other releases of torch
#   make test-gpu   every test that needs a GPU; without one they fail
#   make stress     ten million random steps of the allocator's core, from other seeds than the tests'
#   make sdist, make wheel  what is uploaded, into dist/; wheels for all: cibuildwheel
#   make test-wheel  the wheel in a fresh environment; others too with PYTHONS="python3.10 python3.13"
#   make lint       formatting, style, types, and the C++ compiler's warnings as errors
#   make docs       the pages of docs/, into build/site; warnings and broken links are errors
#   make docs-links   whether links to other sites are answered
#   make bench      every benchmark, into benchmarks/results/*.csv
#   make clean      remove what was built; .venv stays

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := demo
.PHONY: build demo test test-long test-models test-versions test-gpu test-wheel sdist wheel \
    stress lint docs docs-links bench clean

# $(call prepare,GROUPS) sets $python for the recipe's one shell, or ends it with a line that says why.
prepare = python="$$(python3 .ci/environment.py $(1))"
build = "$$python" setup.py --quiet build_ext --inplace

build:
	@$(call prepare,core)
	$(build)

demo:
	@$(call prepare,core)
	$(build)
	"$$python" -m vramx demo --force

# Two tests at a time, where pytest-xdist is there: each worker has half of them, and who is done
# takes from the other.
side_by_side = side_by_side="$$("$$python" -c 'import importlib.util as u; print( \
    "-n 2 --dist worksteal" if u.find_spec("xdist") else "")')"

test:
	@$(call prepare,run test)
	$(build)
	$(side_by_side)
	"$$python" -m pytest -q $$side_by_side -m "not slow"

test-long:
	@$(call prepare,run test)
	$(build)
	$(side_by_side)
	"$$python" -m pytest -q $$side_by_side -m slow

# Each file that has something to say of the libraries; the older releases of transformers run the
# tests of its blocks.
library_tests = tests/test_nn_optimize_models.py tests/test_nn_optimize_releases.py \
    tests/test_nn_optimize_predicted.py tests/test_nn_head_models.py \
    tests/test_nn_head_programs.py tests/test_plan_models.py
all_library_tests = $(library_tests) tests/test_nn_optimize_convolutions.py \
    tests/test_nn_optimize_frozen.py \
    tests/test_nn_optimize_replaced.py \
    tests/test_peft_programs.py tests/test_nn_plain.py \
    tests/test_nn_adapters_models.py tests/test_plan_lightning.py \
    tests/test_patch_libraries.py tests/test_patch_libraries_table.py tests/test_libraries.py \
    tests/test_checkpoint_state.py tests/test_benchmarks_train.py tests/test_callbacks.py \
    tests/test_benchmarks_activations.py tests/test_benchmarks_language.py \
    tests/test_benchmarks_plan.py \
    tests/test_documents.py tests/test_recipes.py \
    tests/test_benchmarks_seeing.py tests/test_snapshot_readers.py tests/test_examples.py

test-models:
	@$(call prepare,run test)
	$(build)
	$(side_by_side)
	failed=0
	for release in newest 5.17 4; do
	    files="$(library_tests)"
	    if [ $$release = newest ]; then files="$(all_library_tests)"; fi
	    libraries="$$("$$python" .ci/libraries.py $$release)"
	    "$$libraries" -m pytest -q $$side_by_side $$files || failed=1
	done
	exit $$failed

version_tests = $(wildcard tests/test_compress*.py tests/test_checkpoint*.py tests/test_patch*.py) \
    $(wildcard tests/test_shim*.py) \
    tests/test_install.py tests/test_install_options.py tests/test_silence.py \
    tests/test_optimizers_offload.py tests/test_optimizers_refused.py \
    tests/test_predict.py tests/test_predict_steps.py tests/test_predict_refused.py \
    tests/test_fake_device.py tests/test_reductions.py \
    $(wildcard tests/test_nn_plain*.py) \
    tests/test_nn_operators.py tests/test_nn_attention.py tests/test_nn_attention_linear.py \
    tests/test_nn_adapters.py

test-versions:
	@$(call prepare,run test)
	$(build)
	failed=0
	for release in 2.6 2.8 2.11 2.14 2.15; do
	    version="$$("$$python" .ci/versions.py $$release)"
	    "$$version" -m pytest -q -n 2 --dist worksteal $(version_tests) || failed=1
	done
	exit $$failed

test-gpu:
	@$(call prepare,run test)
	$(build)
	# As many files at a time as the GPU has room for, then what wants the whole of it.
	side_by_side="$$("$$python" -c 'import importlib.util as u; print(
	    "-n auto --dist loadfile" if u.find_spec("xdist") else "")')"
	tests=("$$python" -m pytest -q --require-gpu)
	failed=0
	"$${tests[@]}" -m "gpu and not alone" $$side_by_side || failed=1
	"$${tests[@]}" -m "gpu and alone" || failed=1
	# The control: what torch promises is tested on torch's own allocator too; *_gpu.py has kernels.
	native=(tests/gpu --allocator native --ignore-glob "*_gpu.py")
	"$${tests[@]}" -m "gpu and not alone" $$side_by_side "$${native[@]}" || failed=1
	"$${tests[@]}" -m "gpu and alone" "$${native[@]}" || failed=1
	exit $$failed

sdist wheel:
	@$(call prepare,core)
	"$$python" .ci/wheel.py $@

test-wheel:
	@$(call prepare,run test dev)
	"$$python" .ci/wheel.py test $(PYTHONS)

stress:
	@$(call prepare,run test)
	"$$python" -c 'import sys; sys.path.insert(0, "tests"); import native_build as native
	program = next(each for each in native.programs() if each.name == "core_stress")
	native.build(program, "plain")'
	build/native/plain/core_stress 10000000 1000000

lint:
	@$(call prepare,run test dev)
	PATH="$$(dirname "$$python"):$$PATH"
	find csrc tests benchmarks examples -name '*.h' -print0 -o -name '*.cpp' -print0 |
		xargs -0 clang-format --dry-run -Werror
	"$$python" -m ruff check .
	"$$python" -m ruff format --check .
	"$$python" -m mypy
	VRAMX_WERROR=1 $(build)

docs:
	@$(call prepare,run docs)
	$(build)
	"$$python" -m benchmarks.documents --check
	# Without what mkdocs-material says of its successor.
	NO_MKDOCS_2_WARNING=1 "$$python" -m mkdocs --quiet build --strict

docs-links:
	@$(call prepare,run docs)
	"$$python" .ci/links.py

bench:
	@$(call prepare,run)
	$(build)
	for name in core traces; do "$$python" -m vramx bench "$$name"; done

clean:
	@rm -rf build dist ./*.egg-info vramx/_core*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find vramx tests benchmarks .ci -name __pycache__ -prune -exec rm -rf {} +
