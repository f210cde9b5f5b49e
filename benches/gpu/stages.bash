# What is tested and measured, stage by stage. Sourced by run.

# Whether so many ranks can be had in some way; says so where not.
can() {
  threads_fit "$1" || [ "$processes" != none ] || { summary "skipped $2: ranks cannot share a GPU here" && return 1; }
}
try_perf() {
  local what=$1 into=$2
  shift 2
  can "$1" "$what" || return
  share "$1"
  try "$what" "$into" bash -c 'perf "$@"' perf "$@"
}
has_torch() { python3 -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' 2>/dev/null; }

stage_facts() { :; }

# Every test of a program whose name fits a pattern: all in one process first, since a start costs seconds; then those that did not pass
# there by themselves, where none takes another with it. After three that hang (one, where ranks cannot share a GPU as they would), the
# others are left alone.
each_test() {
  local stage=$1 program=$2 pattern=$3 file=$results/$1.txt log=$scratch/$2 hung=0 most=3 tests name
  tests=$(timeout 20 "$here/$program" --list 2>>"$file" </dev/null | sed -n 's/: test$//p' | grep -P "$pattern")
  [ -n "$tests" ] || { verdict "$stage: $program lists no tests" 1 && return; }
  share 8
  # Many a call of theirs fails on purpose.
  local -a alone=(env -u COLLECTIVES_FLIGHT_RECORDER_DIR "$here/$program")
  local shared=$threads
  [ "$pattern" != processes ] && [ "$stage" != failures ] || shared=$processes
  [[ "$gpus" -ge 4 || "$shared" =~ ^(yes|shared)$ ]] || most=1
  for name in $tests; do [ "${ended["$stage: $name"]:-}" != HUNG ] || hung=$((hung + 1)); done
  tests=$(for name in $tests; do [ -n "${ended["$stage: $name"]:-}" ] || echo "$name"; done)
  : >"$log"
  # One of them is as well off alone, and so are those of the suite that start processes.
  if [ "$(wc -w <<<"$tests")" -gt 1 ] && [ "$pattern" != processes ] && [ "$hung" -lt "$most" ]; then
    # shellcheck disable=SC2086 # a word for each
    limited $((most * limit)) "$file" "${alone[@]}" --test-threads 1 --logfile "$log" --exact $tests
  fi
  for name in $tests; do
    if grep -qxF "ok $name" "$log"; then
      verdict "$stage: $name" 0
    elif [ "$hung" -ge "$most" ]; then
      summary "skipped $stage: $name: $hung tests of $program have hung"
    else
      try "$stage: $name" "$file" "${alone[@]}" --exact "$name" --test-threads 1 --nocapture
      [[ "$code" =~ ^(124|137)$ ]] && hung=$((hung + 1))
    fi
  done
}

# Without the tests of other NCCL releases, which are simulated ones. Those with processes come last: on one GPU these take turns.
stage_suite() {
  local program
  for program in device-suite device-training; do each_test suite "$program" '^(?!versions::|.*processes)'; done
  for program in device-suite device-training; do each_test suite "$program" processes; done
}

# Ranks that are killed, that stop, that disagree, that never come, and what an abort leaves: with NCCL as it is, in processes and threads. Tests that
# steer the simulated GPU or NCCL say so, and are over at once.
stage_failures() { each_test failures device-failures '^(kills|mismatches|endings|turns|graphs)::'; }

stage_collperf() {
  local ranks file=$results/collperf.txt
  for ranks in 1 2 4; do
    try_perf "collperf all, $ranks ranks" "$file" "$ranks" all -b 8 -e "${COLLPERF_MOST:-64M}" -f 8 -J "$scratch/all-$ranks.json"
    try_perf "collperf all_reduce, $ranks ranks, graph" "$file" "$ranks" \
      all_reduce -b 8 -e "${COLLPERF_MOST:-16M}" -f 8 -G 10 -J "$scratch/graph-$ranks.json"
    try_perf "collperf all_reduce, $ranks ranks, time to issue" "$file" "$ranks" all_reduce -b 8 -e "${COLLPERF_MOST:-1M}" -f 8 -C 1
    try_perf "collperf all_reduce, $ranks ranks, registered" "$file" "$ranks" all_reduce -b 8 -e "${COLLPERF_MOST:-16M}" -f 8 -R 1
    try_perf "collperf all_reduce, $ranks ranks, windows" "$file" "$ranks" all_reduce -b 8 -e "${COLLPERF_MOST:-16M}" -f 8 -R 2
    try_perf "collperf all_reduce -o bxor, $ranks ranks" "$file" "$ranks" \
      all_reduce -o bxor -d u32 -b 8 -e "${COLLPERF_MOST:-64M}" -f 8 -I 1
  done
  if [ -z "${COLLPERF_MOST:-}" ]; then
    try_perf "collperf all_reduce, 1 rank, 4 GiB" "$file" 1 all_reduce -b 1G -e 4G -f 4 -n 5
  else
    summary "skipped collperf all_reduce, 1 rank, 4 GiB: COLLPERF_MOST is $COLLPERF_MOST"
  fi
  cat "$scratch"/*.json >>"$results/collperf.json" 2>/dev/null
}

# Both backends do every op on every type, element by element; their tables must say the same but for the times.
stage_compare() {
  local ranks backend what rows same began file=$results/compare.txt
  local -a call=(all --op all --datatype all --sizes "${COMPARE_SIZES:-1,1000,300007}" -n 1 -w 0)
  for ranks in 1 2 3; do
    what="both backends say the same, $ranks ranks"
    can "$ranks" "$what" && due "$what" || continue
    share "$ranks"
    began=$SECONDS
    for backend in device host; do
      : >"$scratch/$backend"
      if [ "$backend" = device ]; then
        limited "$limit" "$scratch/$backend" bash -c 'perf "$@"' perf "$ranks" "${call[@]}"
      else
        limited "$limit" "$scratch/$backend" "$here/collperf" "${call[@]}" --backend host -g "$ranks"
      fi
      [ "$code" = 0 ] || break
    done
    cat "$scratch/device" >>"$file"
    case "$code" in
      0) same_rows ;;
      123) later "$what" ;;
      *) verdict "$what" "$code" && tail -5 "$scratch/host" >>"$file" ;;
    esac
  done
}
# Compares the two tables.
same_rows() {
  for backend in device host; do
    awk 'NF == 13 && $1 ~ /^[0-9]+$/ {print $1, $2, $3, $4, $5, $9, $13}' "$scratch/$backend" >"$scratch/$backend.rows"
  done
  rows=$(wc -l <"$scratch/device.rows")
  printf '\n## %s ranks: %s rows, and where host (<) and devices (>) differ:\n' "$ranks" "$rows" >>"$file"
  diff "$scratch/host.rows" "$scratch/device.rows" >>"$file"
  same=$?
  # Nothing is the same as nothing.
  [ "$rows" -gt 0 ] || same=1
  verdict "$what" "$same" "$rows rows, $((SECONDS - began)) s"
}

# The kernels alone, then training and a call of every op on every type by one rank. What NCCL asks the driver in vain is no error of ours.
stage_sanitizer() {
  local tool file=$results/sanitizer.txt limit=$((2 * limit)) memcheck
  if ! command -v compute-sanitizer >/dev/null; then
    summary "skipped sanitizer: compute-sanitizer is not installed"
    return
  fi
  memcheck=(compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9)
  # It instruments what is loaded, and NCCL has kernels by the hundred.
  local -x CUDA_MODULE_LOADING=LAZY
  local -a kernels=("$here/device-bench" kernels --bytes 1048576 --rounds 1)
  try "compute-sanitizer memcheck on the kernels" "$file" "${memcheck[@]}" "${kernels[@]}"
  for tool in racecheck initcheck synccheck; do
    try "compute-sanitizer $tool on the kernels" "$file" compute-sanitizer --tool "$tool" --error-exitcode 9 "${kernels[@]}"
  done
  try "compute-sanitizer memcheck on training alone" "$file" \
    env RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29517 "${memcheck[@]}" "$here/train_device"
  try "compute-sanitizer memcheck on a rank alone" "$file" "${memcheck[@]}" \
    "$here/collperf" all --op all --datatype all --sizes 1000 -n 1 -w 0 -g 1 --ranks thread --backend device
}

# A rank of torch.distributed and one of ours in one communicator. Kernels of PyTorch's are loaded when they are used: it has thousands.
stage_python() {
  has_torch || { summary "skipped python: there is no PyTorch" && return; }
  local -x CUDA_MODULE_LOADING=LAZY
  share 2
  try "a Python rank and a Rust rank in one communicator" "$results/python.txt" python3 "$here/beside-torch" "$here/beside_torch"
}

stage_kernels() {
  local limit=$((3 * limit))
  try "kernels against a copy" "$results/kernels.csv" "$here/device-bench" kernels ${KERNEL_SIZES:+--bytes "$KERNEL_SIZES"}
  timeout 20 nvidia-smi --query-gpu=clocks.sm,clocks.mem,temperature.gpu,power.draw,clocks_event_reasons.active --format=csv \
    >>"$results/facts.txt" 2>&1
}

stage_geometry() {
  local limit=$((3 * limit))
  try "kernels with other threads and blocks" "$results/geometry.csv" \
    "$here/device-bench" geometry --bytes "${GEOMETRY_SIZES:-67108864,268435456}"
}

# Clocks are left as they are: the machine may not be ours.
stage_counters() {
  if ! command -v ncu >/dev/null; then
    summary "skipped counters: ncu is not installed"
    return
  fi
  local metrics=dram__throughput.avg.pct_of_peak_sustained_elapsed,sm__throughput.avg.pct_of_peak_sustained_elapsed
  metrics+=,lts__t_sector_hit_rate.pct,sm__warps_active.avg.pct_of_peak_sustained_active,gpu__time_duration.sum
  local limit=$((3 * limit))
  local -x CUDA_MODULE_LOADING=LAZY
  try "counters of the kernels" "$results/counters.csv" ncu --csv --clock-control none --kernel-name regex:^fold_ --metrics "$metrics" \
    "$here/device-bench" kernels --bytes 268435456 --rounds 1
}

stage_calls() {
  local file=$results/calls.csv ranks what
  for ranks in 1 2; do
    what="calls, $ranks ranks"
    threads_fit "$ranks" || { summary "skipped $what: threads cannot share a GPU here" && continue; }
    share "$ranks"
    # cudarc looks for a name without a version. Its communicator waits for its ranks without a limit, and is made for a device each.
    local -a options=(--ranks "$ranks")
    [ "$ranks" -le "$gpus" ] || options+=(--without-cudarc)
    try "$what" "$file" env LD_LIBRARY_PATH="$names:${LD_LIBRARY_PATH:-}" "$here/device-bench" calls "${options[@]}"
  done
  has_torch || { summary "skipped calls of PyTorch: there is none" && return; }
  local -x CUDA_MODULE_LOADING=LAZY
  for ranks in 1 2; do
    share "$ranks"
    try "calls of PyTorch, $ranks ranks" "$file" python3 "$here/torch-calls" "$ranks"
  done
}

# nccl-tests' own programs: of the bundle, of the PATH, or built here from the sources in the bundle.
stage_nccl-tests() {
  local programs=$here/nccl-tests ranks what wanted=() limit=$((4 * limit)) file=$results/nccl-tests.txt
  for ranks in 1 2; do
    what="collperf against nccl-tests, $ranks ranks"
    if [ "$ranks" -gt "$gpus" ]; then
      summary "skipped $what: nccl-tests wants a GPU for each, and there are $gpus"
    elif due "$what"; then
      wanted+=("$ranks")
    fi
  done
  [ ${#wanted[@]} -gt 0 ] || return 0
  if [ ! -e "$programs/all_reduce_perf" ]; then
    if command -v all_reduce_perf >/dev/null; then
      programs=$(dirname "$(command -v all_reduce_perf)")
    elif [ -d "$programs" ] && command -v nvcc >/dev/null; then
      programs=$scratch/nccl-tests
      limited "$limit" "$file" make -C "$here/nccl-tests" -j "$(nproc)" BUILDDIR="$programs" NCCL_HOME="$names/.." \
        CUDA_HOME="$(dirname "$(dirname "$(realpath "$(command -v nvcc)")")")" NVCC_GENCODE="-arch=native"
      case "$code" in
        0) ;;
        123) later "building nccl-tests" && return ;;
        *) verdict "building nccl-tests" "$code" && return ;;
      esac
    else
      summary "skipped nccl-tests: neither all_reduce_perf in the bundle or on the PATH, nor its sources in the bundle with nvcc"
      return
    fi
  fi
  for ranks in "${wanted[@]}"; do
    try "collperf against nccl-tests, $ranks ranks" "$file" env LD_LIBRARY_PATH="$names:${LD_LIBRARY_PATH:-}" \
      python3 "$here/against-nccl-tests" "$programs" "$here/collperf" "$ranks"
  done
}

# The training examples on the host and on devices. The first says itself whether both come to the same; of candle's, which multiplies with
# cuBLAS there and by itself on the host, the last losses may differ by a hundredth. Its CUDA libraries are PyTorch's, where the loader has none.
stage_training() {
  local ranks what file=$results/training.txt cuda
  for ranks in 1 2; do
    what="training on $ranks ranks"
    [ "$ranks" -le "$gpus" ] || [ "$processes" != none ] || { summary "skipped $what: processes cannot share a GPU here" && continue; }
    share "$ranks"
    try "$what" "$file" bash -c 'launched "$@"' launched "$ranks" "$here/train_device"
  done
  [ -e "$here/candle-ddp" ] || { summary "skipped training with candle: the bundle has none (bundle --candle)" && return; }
  cuda=$(python3 -c 'import glob, nvidia; print(":".join(glob.glob(list(nvidia.__path__)[0] + "/*/lib")))' 2>/dev/null)
  export -f same_loss
  for ranks in 1 2; do
    what="training with candle on $ranks ranks"
    [ "$ranks" -le "$gpus" ] || [ "$processes" != none ] || { summary "skipped $what: processes cannot share a GPU here" && continue; }
    share "$ranks"
    try "$what" "$file" env LD_LIBRARY_PATH="$cuda:${LD_LIBRARY_PATH:-}" bash -c 'same_loss "$@"' same_loss "$ranks"
  done
}
# Trains with candle on the host, and on devices in buckets and with a call for each parameter; whether all end with the same loss.
same_loss() {
  local way options said losses=()
  for way in "" "--gpu" "--gpu --averaging each-parameter"; do
    read -ra options <<<"$way"
    said=$(launched "$1" "$here/candle-ddp" --every 0 "${options[@]}")
    printf '%s\n' "$said"
    losses+=("$(sed -n 's/.*last loss \([0-9.]*\),.*/\1/p' <<<"$said")")
  done
  printf '%s\n' "${losses[@]}" | awk 'NR == 1 { host = $1 } { off = $1 - host; if ($1 == "" || off > 0.01 || off < -0.01) bad = 1 } END { exit bad || NR != 3 }'
}
