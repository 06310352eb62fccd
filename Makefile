# make chat            talk to the small model in models/ (PROMPT="..." answers once and exits)
# make test            format, lint, types, import rules, tests
# Both set up .venv/ by themselves. MODEL=FILE.gguf chats with another model.

PYTHON ?= python3
MODEL ?= models/demo-hy3-iq2mix.gguf
PROMPT ?=
ARGS ?=
VENV := .venv
READY := $(VENV)/.ready
DEV_READY := $(VENV)/.dev-ready
# Set-up compiles these, so that no answer waits for it.
COMPILED := $(wildcard infer/kernels/*.py) infer/recorded/compiled_lookup.py

# By way of the environment: quotes, dollars and backticks in a prompt are no commands.
export CHAT_PROMPT := $(value PROMPT)

.PHONY: chat test check clean

chat: $(READY)
ifeq ($(PROMPT),)
	@$(VENV)/bin/infer chat --model $(MODEL) $(ARGS)
else
	@$(VENV)/bin/infer chat --model $(MODEL) --temp 0 --prompt "$$CHAT_PROMPT" $(ARGS)
endif

test: $(DEV_READY) check
	$(VENV)/bin/pytest

check: $(DEV_READY)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

$(READY): pyproject.toml constraints.txt tools/setup.sh $(COMPILED)
	@PYTHON="$(PYTHON)" tools/setup.sh $(VENV) run
	@touch $@

$(DEV_READY): pyproject.toml constraints.txt tools/setup.sh $(COMPILED)
	@PYTHON="$(PYTHON)" tools/setup.sh $(VENV) dev
	@touch $@ $(READY)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
