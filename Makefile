# The two uses that matter:
#   make demo   a real cluster on this machine, kubevpn on a laptop beside it, and back to nothing
#   make test   everything that shows that kubevpn works
# With a cluster of your own: make install, then kubevpn connect.

GO     ?= go
PREFIX ?= /usr/local

VERSION ?= $(shell sed -n 's/^\tversion = "\(.*\)"$$/\1/p' internal/version/version.go)
COMMIT  := $(shell git rev-parse --short=12 HEAD 2>/dev/null)$(shell git diff --quiet HEAD 2>/dev/null || echo -dirty)
IMAGE   ?= docker.io/kubevpn/kubevpn:$(VERSION)

LDFLAGS := -s -w -X kubevpn/internal/version.version=$(VERSION) -X kubevpn/internal/version.commit=$(COMMIT)
BUILD   := CGO_ENABLED=0 $(GO) build -trimpath -ldflags '$(LDFLAGS)'
# What the image holds: /traffic, which runs as an ordinary user, and iptables for its gateway.
LAYOUT  := --ref $(IMAGE) --file bin/traffic:/traffic --user 65532:65532 --iptables

.DEFAULT_GOAL := help
.PHONY: help build install image push-image lab demo demo-down test test-ipvs bench lint clean bin/kubevpn bin/traffic bin/lab

help: ## show this
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | awk -F'\t' '{ printf "  %-11s %s\n", $$1, $$2 }'

build: bin/kubevpn bin/traffic ## bin/kubevpn for the laptop, bin/traffic for the cluster

bin/kubevpn bin/traffic bin/lab:
	$(BUILD) -o $@ ./cmd/$(notdir $@)

install: bin/kubevpn ## put kubevpn into PREFIX/bin (PREFIX=/usr/local)
	install -d $(DESTDIR)$(PREFIX)/bin
	install -m 0755 bin/kubevpn $(DESTDIR)$(PREFIX)/bin/kubevpn

image: bin/traffic ## bin/kubevpn-image.tar of IMAGE, which `ctr -n k8s.io images import` takes
	$(GO) run ./cmd/image build $(LAYOUT) --out bin/kubevpn-image.tar

push-image: bin/traffic ## push IMAGE to its registry, with docker login's credentials
	$(GO) run ./cmd/image push $(LAYOUT)

lab: bin/lab ## bin/lab, which runs real clusters on this machine

demo: build image lab ## a cluster, connect, a page by name, ClusterIP and pod IP, disconnect (Linux, root)
	$(GO) run ./internal/e2e/demo $(IMAGE)

demo-down: lab ## remove what demo made
	bin/lab --name demo down

test: ## unit tests, network namespaces, real clusters (the last two: Linux, root)
	scripts/test

test-ipvs: ## the part of test whose cluster has kube-proxy in IPVS mode (Linux, root)
	scripts/packages
	$(GO) test -v -tags lab -count=1 -timeout 15m -run 'TestLabLifecycle/ipvs' ./internal/lab
	$(GO) test -v -tags e2e -count=1 -timeout 30m -run TestIPVS ./internal/e2e

bench: ## measure against the kernel and kubectl port-forward; writes docs/performance.md and its plots (Linux, root)
	$(GO) run ./internal/e2e/bench

lint: ## golangci-lint, if it is installed; formatting and layers are tests
	golangci-lint run

clean: ## remove bin
	rm -rf bin
