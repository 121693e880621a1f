#!/usr/bin/env bash
# Makes .gpu-toolchain/PLUGIN with what compiles GPU code where there is no GPU and no CUDA toolkit: JAX's CUDA plugin and NVIDIA's assembler.
# Usage: scripts/gpu_toolchain.sh [cuda13|cuda12], default cuda13; prints the folder. .venv stays without a CUDA plugin: those who need one put
# the folder on PYTHONPATH. A second run finds its stamp and ends at once.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

plugin=${1:-cuda13}
jax_version=0.11.2
case $plugin in
  cuda13) assembler=(nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88) ;;
  cuda12) assembler=(nvidia-cuda-nvcc-cu12==12.9.86) ;; # holds libdevice as well
  *)
    echo "gpu_toolchain: error: the plugin is cuda13 or cuda12, got: $plugin" >&2
    exit 2
    ;;
esac
packages=("jax-$plugin-plugin==$jax_version" "jax-$plugin-pjrt==$jax_version" "${assembler[@]}")
folder=.gpu-toolchain/$plugin
stamp=$folder/stamp
wanted="${packages[*]}"

if [[ ! -f $stamp || $(<"$stamp") != "$wanted" ]]; then
  echo "== installing ${packages[*]} into $folder (a minute, 240 MB)" >&2
  mkdir -p .gpu-toolchain
  unfinished=$(mktemp -d "$folder.XXXXXX")
  trap 'rm -rf "$unfinished"' EXIT
  # --no-deps: the libraries that the plugin would load on a GPU (cuBLAS, cuDNN, NCCL; 3 GB) are not needed to compile.
  .venv/bin/python -m pip install --disable-pip-version-check --quiet --no-deps --target "$unfinished" "${packages[@]}" >&2
  echo "$wanted" >"$unfinished/stamp"
  rm -rf "$folder"
  mv -T "$unfinished" "$folder"
fi
echo "$folder"
