#!/usr/bin/env bash
# Everything that only a GPU can prove, in one go: the GPU tests, the demo and all benchmarks, into OUT (default docs/results).
#
# FlashAttention 4, cuDNN's flex kernels and Inductor compile for minutes, one kernel after another; so the kernels of the
# benchmarks are compiled first, by several processes beside the tests, into the caches on disk. What is timed afterwards runs
# alone.   usage: benchmarks/prove.sh [OUT] [STEP ...]   steps: prepare mixed padding layers (default: all, in this order)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-docs/results}; shift || true
steps=${*:-prepare mixed padding layers}
python=${PYTHON:-python3}
logs=$(mktemp -d)
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 FLEX_ATTENTION_CUTE_DSL_CACHE_ENABLED=1
mkdir -p "$out"
start=$SECONDS status=0

say() { echo "[$((SECONDS - start)) s] $*"; }
run() { # NAME COMMAND...: its log to $logs/NAME, its outcome to the terminal
    local name=$1 code=0; shift
    "$@" >"$logs/$name" 2>&1 || code=$?
    say "$name: exit $code"
    if [ $code != 0 ]; then tail -n 12 "$logs/$name" | cut -c1-220; fi
    return $code
}

for step in $steps; do
    case $step in
    prepare)
        run warm-1 "$python" -m benchmarks.mixed --warm --no-measured --works A 33k-p2 &
        run warm-2 "$python" -m benchmarks.mixed --warm --no-measured --works 33k-p4 32k-p8 &
        run warm-3 "$python" -m benchmarks.mixed --warm --no-measured --works 8k-p4 4k-p2 8k-p4-mla &
        run warm-4 "$python" -m benchmarks.mixed --warm --no-measured --works A-contiguous A-gqa A-mla 33k-p2-contiguous &
        run warm-5 "$python" -m benchmarks.padding --out "$logs/padding.json" &
        run demo "$python" examples/train_packed.py --report "$out/demo_h200.json" --out "$logs/pictures" &
        run gpu_tests "$python" -m benchmarks.gpu_tests --out "$out/gpu_tests.json" ${COMMIT:+--commit "$COMMIT"} -n "${JOBS:-6}" tests compile_tests \
            || status=1
        grep -a "^FAILED\|^ERROR\| passed" "$logs/gpu_tests" | cut -c1-200
        wait
        ;;
    mixed | padding | layers)
        run "$step" "$python" -m "benchmarks.$step" --out "$out/${step}_h200.json" || status=1
        ;;
    *)
        echo "unknown step $step: use prepare, mixed, padding or layers" >&2; exit 2 ;;
    esac
done
say "done; logs in $logs"
exit $status
