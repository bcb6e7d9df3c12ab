# make train ARGS="--config recipes/mine.yaml --train.steps 100"
.PHONY: help train test preflight launch report
RUN = $(shell ls -td runs/*/ 2>/dev/null | head -1)
help:      ; @grep -E '^[a-z]+:.*##' Makefile | sed 's/:.*##/  /' ## this list
train:     ; .venv/bin/deepspeed $(GPUS:%=--num_gpus %) train.py $(ARGS) ## on this machine; GPUS=2 for some of them
test:      ; ./scripts/test.sh $(ARGS) ## the tests; ARGS='-m "not launch"' for the fast ones
preflight: ; .venv/bin/python scripts/preflight.py --hostfile hostfile -- train.py $(ARGS) ## check every host
launch:    ; scripts/launch.sh --hostfile hostfile --max_restarts 3 -- train.py $(ARGS) ## on all hosts
report:    ; .venv/bin/python scripts/report.py $(or $(ARGS),$(RUN)) ## the newest run as HTML
