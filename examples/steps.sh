# What demo.sh and smollm2.sh share; they set $out and source it.

if [ -e "$out" ] && [ ! -f "$out/times.tsv" ]; then
    echo "error: $out exists and was not made by this script; choose another folder" >&2
    exit 2
fi

quoted() { # quoted WORD...: as one would type them
    local word line=
    for word; do
        case $word in
        '' | *[!A-Za-z0-9_./:=,+@%-]*) case $word in *\'*) word=$(printf %q "$word") ;; *) word="'$word'" ;; esac ;;
        esac
        line+=" $word"
    done
    printf '%s' "${line# }"
}

step() { # [input=TEXT] step NAME COMMAND...: prints the command so that it can be copied, runs it, and keeps its time
    local name=$1 start=$SECONDS
    shift
    local bold= plain=
    [ -t 1 ] && bold=$'\033[1m' plain=$'\033[0m'
    printf '\n%s$ %s%s%s\n' "$bold" "$(quoted "$@")" "${input:+ <<<$(quoted "$input")}" "$plain"
    if [ -n "${input:-}" ]; then "$@" <<<"$input"; else "$@"; fi
    printf '%s\t%d\n' "$name" $((SECONDS - start)) >>"$out/times.tsv"
}

print_times() { # the seconds of each stage
    printf '\nSeconds per stage:\n'
    awk -F'\t' '{ seconds[$1] += $2; total += $2; if (!($1 in seen)) { seen[$1]; order[n++] = $1 } }
        END { for (i = 0; i < n; i++) printf "  %-16s %4d\n", order[i], seconds[order[i]]
              printf "  %-16s %4d\n", "total", total }' "$out/times.tsv"
}
