# Needs python3 (3.11 or later) and a package index; everything else goes into .venv.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-slow lint clean

# GPT-3 175B on 96 H800: tensor parallel 8, pipeline parallel 12. Without recomputation the first stages hold the
# activations of up to 12 micro-batches, more than their 80 GB take: exit status 3, the verdict that a plan does not
# work. Here that is an answer and a good end; any other status but 0 is a failure.
DEMO := echo-launch --simulate --world-size 96 --cluster h800:12x8 examples/train_mcore.py \
	--layers 96 --hidden 12288 --heads 96 --seq 2048 --vocab 51200 \
	--micro-batch 1 --micro-batches 24 --tp 8 --pp 12

demo: $(INSTALLED)
	@echo "$(DEMO)"
	@$(BIN)/$(DEMO) || { \
		status=$$?; test $$status -eq 3 || exit $$status; \
		echo "Exit status 3 is Echo's verdict on this plan, not a failure of the demo: see the top of the report."; \
	}

test: $(INSTALLED)
	$(BIN)/python -m pytest

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -m slow

# All three run, so that one report shows everything; the target fails if any of them does.
lint: $(INSTALLED)
	@status=0; \
	$(BIN)/ruff check . || status=1; \
	$(BIN)/ruff format --check . || status=1; \
	$(BIN)/mypy || status=1; \
	exit $$status

# Made again when what is to be installed changes; TORCH takes effect on a fresh .venv (make clean).
# DS_BUILD_OPS=0: DeepSpeed compiles its operators when they are used, which a simulation never does.
$(INSTALLED): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Echo needs Python 3.11 or later" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet -e ".[test,megatron,deepspeed]"
	touch $@

clean:
	rm -rf $(VENV)
