# Everything runs in .venv, which each target makes when it is missing and remakes when the metadata changed.
PYTHON ?= python3.11
BIN := .venv/bin
STAMP := .venv/installed
# two processes, a file's tests in one of them: files share what they measured and built; in their order, for the
# files of few but long tests would otherwise come last, and one process would wait for the other
TEST_ARGS ?= -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: env demo test lint clean

env: $(STAMP)

$(STAMP): setup.cfg pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[agents,sb3,ray,onnxruntime,plots,zoo,dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/python scripts/demo.py

# what tests import is compiled once, not by each process that they start
test: export PYTHONDONTWRITEBYTECODE :=
# threads that wait sleep: those of two processes would turn on processors that the others need
test: export OMP_WAIT_POLICY := PASSIVE
test: export TVM_THREAD_POOL_SPIN_COUNT := 0
test: $(STAMP)
	$(BIN)/python -m pytest $(TEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache
