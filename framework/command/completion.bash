# Completion of `framework` and `python -m framework`; Hydra's own script doesn't complete the latter.
# For any other `python …`, file names are completed.
_framework_completion() {
    local command=("${COMP_WORDS[0]}") line=${COMP_LINE:0:COMP_POINT} pattern='^[^ ]+ +(.*)$'
    if [[ ${command##*/} == python* ]]; then
        command+=(-m framework)
        pattern='^[^ ]+ +-m +framework +(.*)$'
    fi
    [[ $line =~ $pattern ]] || return
    local word=${line##* }
    local found=$(COMP_LINE="framework ${BASH_REMATCH[1]}" "${command[@]}" -sc query=bash 2> /dev/null)
    COMPREPLY=($(compgen -W "$found" -- "$word"))
    if [[ $COMP_WORDBREAKS == *=* && $word == *=* ]]; then # what Bash replaces begins after the `=`
        COMPREPLY=("${COMPREPLY[@]#"${word%=*}="}")
    fi
}
complete -o nospace -o bashdefault -o default -F _framework_completion framework python python3
