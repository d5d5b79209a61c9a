# The positional arguments that the eval.sh and eval_methods.sh of all benchmarks share. Sourced by them, not run.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
six="CUDA_VISIBLE_DEVICES method max_capacity_prompts attn_implementation source_path model_path"

refuse() {
    echo "$(basename "$0"): $1" >&2
    usage
}

# explain FOLDER: what each of the six arguments is; results go to FOLDER.
explain() {
    cat >&2 <<TEXT
  CUDA_VISIBLE_DEVICES  device numbers such as 0 or 0,1; "" runs on the CPU
  method                e.g. snapkv; several separated by commas share one model load
  max_capacity_prompts  kept prompt tokens per head, or several separated by commas; -1 is the default of 512
  attn_implementation   auto, eager, sdpa, flash_attention_2 or flash_attention_3
  source_path           prefix of the result folder: results go to \${source_path}$1
  model_path            local folder, hub id, or smollm2
TEXT
}

# check MOST ARGUMENTS...: refuses unless the six and no more than MOST in all are there; sets CUDA_VISIBLE_DEVICES and
# the runner's options.
check() {
    local most="$1"
    shift
    [ "$#" -ge 6 ] && [ "$#" -le "$most" ] || refuse "6 to $most arguments are needed, $# were given"
    [[ "$1" =~ ^(-1|[0-9]+(,[0-9]+)*|(GPU|MIG)-.+)?$ ]] || refuse "CUDA_VISIBLE_DEVICES '$1' (argument 1) is no list of device numbers"
    [ -n "$2" ] || refuse "method (argument 2) is empty"
    [[ "$3" =~ ^(-1|[0-9]+(,[0-9]+)*)$ ]] || refuse "max_capacity_prompts '$3' (argument 3) is no number of tokens"
    [[ "$4" =~ ^(auto|eager|sdpa|flash_attention_[23])$ ]] || refuse "attn_implementation '$4' (argument 4) is unknown"
    [ -n "$6" ] || refuse "model_path (argument 6) is empty"
    export CUDA_VISIBLE_DEVICES="$1"
    options=(--method "$2" --max_capacity_prompts "$3" --attn_implementation "$4" --model_path "$6")
}

given() {
    case "${1,,}" in
        "" | none) return 1 ;;
        *) return 0 ;;
    esac
}

# add_quantiser [quant_method [nbits]]
add_quantiser() {
    if given "${1:-}"; then
        options+=(--quant_method "$1")
        if given "${2:-}"; then options+=(--nbits "$2"); fi
    fi
}

# start RUNNER: with the options collected so far.
start() {
    exec "${PYTHON:-python3}" "$root/$1" "${options[@]}"
}

# sweep EVAL_SH ARGUMENTS...: several methods and budgets by one call of EVAL_SH, hence with one model load.
sweep() {
    local eval_sh="$1" methods budgets
    shift
    usage() {
        cat >&2 <<TEXT
usage: bash $0 ${six/method/methods}
  methods               names separated by commas; METHODS in the environment takes their place
  max_capacity_prompts  kept prompt tokens per head, several separated by commas, or all: 64 96 128 256 512 1024 2048 4096
  the others and the further environment as in eval.sh
TEXT
        exit 2
    }
    [ "$#" -eq 6 ] || refuse "6 arguments are needed, $# were given"
    methods="${METHODS:-$2}"
    budgets="$3"
    if [ "$budgets" = all ]; then budgets=64,96,128,256,512,1024,2048,4096; fi
    [ -n "$methods" ] || refuse "methods (argument 2) is empty and METHODS is not set"
    [[ "$budgets" =~ ^(-1|[0-9]+(,[0-9]+)*)$ ]] || refuse "max_capacity_prompts '$3' (argument 3) is neither numbers of tokens nor all"
    exec bash "$eval_sh" "$1" "$methods" "$budgets" "$4" "$5" "$6"
}
