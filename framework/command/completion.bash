# Completion of `framework` and `python -m framework`. For any other `python …`, file names are completed.
_framework_completion() {
    local command=("${COMP_WORDS[0]}") line=${COMP_LINE:0:COMP_POINT} pattern='^[^ ]+ +(.*)$' found
    if [[ ${command##*/} == python* ]]; then
        command+=(-m framework)
        pattern='^[^ ]+ +-m +framework +(.*)$'
    fi
    COMPREPLY=()
    [[ $line =~ $pattern ]] || return
    line="framework ${BASH_REMATCH[1]}"
    local word=${line##* }
    while IFS= read -r found; do
        if [[ $COMP_WORDBREAKS == *=* && $word == *=* ]]; then # what Bash replaces begins after the `=`
            found=${found#"${word%=*}="}
        fi
        [[ -n $found ]] && COMPREPLY+=("$found")
    done < <(COMP_LINE=$line "${command[@]}" -sc query=bash 2> /dev/null)
}
complete -o nospace -o bashdefault -o default -F _framework_completion framework python python3
