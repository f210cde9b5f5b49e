# What this machine has: its GPUs, an NCCL, and whether ranks can share a GPU. Sourced by run.

export COLLECTIVES_TEST_GPU=real
# Ranks that share a device need queues of their own, and kernels that are there before the first call.
export CUDA_DEVICE_MAX_CONNECTIONS=32 CUDA_MODULE_LOADING=EAGER NCCL_MULTI_RANK_GPU_ENABLE=1
# What the library has to say of a call that hangs is said before that is stopped.
export COLLECTIVES_TIMEOUT=$((limit * 3 / 4)) COLLECTIVES_FLIGHT_RECORDER_DIR=$results/flight
mkdir -p "$results/flight"

# NCCL: ours, else the one that the loader knows, else PyTorch's.
if [ -z "${COLLECTIVES_NCCL_LIBRARY:-}" ]; then
  if [ -e "$here/lib/libnccl.so.2" ]; then
    export COLLECTIVES_NCCL_LIBRARY="$here/lib/libnccl.so.2"
  elif ! ldconfig -p 2>/dev/null | grep 'libnccl\.so\.2' >/dev/null; then
    found=$(python3 -c 'import nvidia.nccl as n; print(list(n.__path__)[0] + "/lib/libnccl.so.2")' 2>/dev/null)
    [ -z "$found" ] || export COLLECTIVES_NCCL_LIBRARY="$found"
  fi
fi

# NCCL and its header under the names that those look for who link it or open it without a version.
names=$scratch/nccl/lib
mkdir -p "$names"
if [ -n "${COLLECTIVES_NCCL_LIBRARY:-}" ]; then
  for name in libnccl.so libnccl.so.2; do ln -s "$(realpath "$COLLECTIVES_NCCL_LIBRARY")" "$names/$name"; done
  include=$(dirname "$(dirname "$(realpath "$COLLECTIVES_NCCL_LIBRARY")")")/include
  [ -d "$include" ] || include=$(python3 -c 'import nvidia.nccl as n; print(list(n.__path__)[0] + "/include")' 2>/dev/null)
  [ ! -d "$include" ] || ln -s "$include" "$names/../include"
fi

# How so many ranks can be had: as threads of one process, as processes, as what NCCL takes for different hosts; the first that works.
threads_fit() { [ "$1" -le "$gpus" ] || [ "$threads" = yes ]; }
launched() {
  local ranks=$1
  shift
  if [ "$ranks" -le "$gpus" ] || [ "$processes" = shared ]; then
    "$here/collrun" --no-prefix --nproc-per-node "$ranks" -- "$@"
  else
    NCCL_NET=Socket NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1 "$here/collrun" --no-prefix --nproc-per-node "$ranks" -- \
      sh -c 'export NCCL_HOSTID="rank$RANK"; exec "$0" "$@"' "$@"
  fi
}
# collperf with so many ranks: as threads where they fit.
perf() {
  local ranks=$1
  shift
  if threads_fit "$ranks"; then
    "$here/collperf" "$@" --backend device -g "$ranks" --ranks thread
  else
    launched "$ranks" "$here/collperf" "$@" --backend device
  fi
}
export -f launched perf threads_fit
export here gpus threads processes

# Whether one rank more than there are GPUs comes through a collective in such a way; what it says is in the facts.
probe() {
  threads=$1 processes=$2
  share "$((gpus + 1))"
  limited 30 "$results/facts.txt" bash -c 'perf "$@"' perf "$((gpus + 1))" all_reduce -b 8 -e 8 -n 5
}
# Processes are tried though threads are preferred, since some tests are made of them.
probe_all() {
  local as_threads=yes
  probe yes none || as_threads=no
  probe no shared || probe no hosts || processes=none
  threads=$as_threads sharing=()
  summary "ranks that share a GPU: threads $threads, processes $processes"
}

summary "commit $(cat "$here/commit" 2>/dev/null || echo unknown), $(date -u '+%Y-%m-%d %H:%M:%S') UTC, NCCL from ${COLLECTIVES_NCCL_LIBRARY:-the loader}"
{
  uname -a
  grep -m1 'model name' /proc/cpuinfo
  timeout 20 nvidia-smi
  timeout 20 nvidia-smi --query-gpu=index,name,pci.bus_id,driver_version,memory.total,clocks.max.sm --format=csv
  timeout 20 nvidia-smi topo -m
} >>"$results/facts.txt" 2>&1
gpus=$(timeout 20 nvidia-smi -L 2>/dev/null | grep -c '^GPU ')
[ "$gpus" -gt 0 ] || gpus=1
threads=no processes=none
if ! limited "$limit" "$results/facts.txt" "$here/collperf" all_reduce --backend device -g 1 -b 8 -e 8; then
  summary "there is no GPU that can be used: $(grep -v '^##' "$results/facts.txt" | tail -1)"
  pack
  exit 5
fi
library=$(sed -n 's/.*nccl-library=//p' "$results/facts.txt" | tail -1)
summary "$gpus GPUs, NCCL $library, driver $(timeout 20 nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -1)"
probe_all
