# Completion of `framework` and `python -m framework`. Any other `python …` is completed by Zsh's own function.
_framework_completion() {
    local -a command candidates
    local first=2
    command=("${(Q)words[1]}")
    if [[ ${words[1]:t} == python* ]]; then
        if [[ $CURRENT -lt 4 || ${words[2]} != -m || ${words[3]} != framework ]]; then
            if (( $+functions[_python] )); then _python "$@"; else _default "$@"; fi
            return
        fi
        command+=(-m framework)
        first=4
    fi
    local line="framework ${(j: :)${(@Q)words[first,CURRENT-1]}} ${(Q)PREFIX}"
    candidates=("${(@f)$(COMP_LINE=$line "${command[@]}" -sc query=zsh 2> /dev/null)}")
    compadd -S '' -- "${(@)candidates:#}"
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -i; }
compdef _framework_completion framework python python3
