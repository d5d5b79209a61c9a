# make setup        environment in .venv and the bundled model; the one place that installs
# make demo         FullKV, SnapKV, PyramidKV and StreamingLLM on part of the sample suite, a table and its report
# make demo-full    the same on all 18 sample sets
# make test         the whole suite, offline once installed
# make test-oldest  contract suite and core on the oldest transformers that is supported
# make lint         ruff
# make docs         writes the generated pages; make docs-check fails when they are stale
# make clean        removes environments and caches of tools, never results or models

VENV ?= .venv
VENV_OLDEST ?= .venv-oldest
PYTHON ?= python3
RUN = $(VENV)/bin/python
RUN_OLDEST = $(VENV_OLDEST)/bin/python
PYTEST_WORKERS ?= 2
TEST_ARGS ?=

# Two examples each of sets with short prompts and short answers (one document, several, questions with examples, labels),
# so that two CPU cores are done in minutes; demo-full has the rest.
DEMO_DATASETS ?= multifieldqa_en,hotpotqa,triviaqa,trec
DEMO_EXAMPLES ?= 2
DEMO_METHODS ?= fullkv,snapkv,pyramidkv,streamingllm
DEMO_BUDGET ?= 128
DEMO_ARGS ?=
demo_run = $(RUN) run_longbench.py --model_path smollm2 --data_dir data/sample --method $(DEMO_METHODS) \
	--max_capacity_prompts $(DEMO_BUDGET) --kv_cache_granularity kv_head --overwrite $(DEMO_ARGS)

# The part of the suite that depends on transformers.
OLDEST_TESTS ?= tests/contract tests/cache tests/methods tests/backends tests/test_assets.py tests/test_golden_e2e.py \
	tests/test_decoder.py tests/test_graph_engine.py tests/test_fused_model.py tests/test_several_devices.py
# One thread a worker: two workers with two threads each only get into each other's way on two cores.
pytest = HF_HUB_OFFLINE=1 OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(1) -m pytest -n $(PYTEST_WORKERS) \
	-m "not slow and not gpu" $(TEST_ARGS) $(2)

.PHONY: setup setup-oldest demo demo-full test test-oldest lint docs docs-check clean

setup:
	@PYTHON="$(PYTHON)" bash scripts/setup_env.sh $(VENV)
	@$(RUN) -m kvfactory.assets smollm2 >/dev/null

setup-oldest:
	@PYTHON="$(PYTHON)" bash scripts/setup_env.sh $(VENV_OLDEST) constraints-oldest.txt
	@$(RUN_OLDEST) -m kvfactory.assets smollm2 >/dev/null

demo: setup
	HF_HUB_OFFLINE=1 $(demo_run) --datasets $(DEMO_DATASETS) --max_num_examples $(DEMO_EXAMPLES) --save_dir results/demo
	$(RUN) eval.py --results_dir results/demo

demo-full: setup
	HF_HUB_OFFLINE=1 $(demo_run) --save_dir results/demo-full --datasets \
		$$($(RUN) -c 'from pathlib import Path; print(*sorted(p.stem for p in Path("data/sample").glob("*.jsonl")), sep=",")')
	$(RUN) eval.py --results_dir results/demo-full

test: setup
	$(call pytest,$(RUN),)

test-oldest: setup-oldest
	$(call pytest,$(RUN_OLDEST),$(OLDEST_TESTS))

lint: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

docs: setup
	$(RUN) -m kvfactory.docs

# docs/planted_retrieval.md is no part of it: computing it again takes 40 s on one core. `make test` computes a part of it,
# and `python scripts/planted_table.py --check` all, which a change of a method's selection calls for.
docs-check: setup
	$(RUN) -m kvfactory.docs --check

clean:
	rm -rf $(VENV) $(VENV_OLDEST) .pytest_cache .ruff_cache build dist *.egg-info
