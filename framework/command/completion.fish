# Completion of `framework` and `python -m framework`. Any other `python …` is completed as before.
function __framework_completion
    set -l words (commandline -opc)
    set -l program $words[1]
    set -e words[1]
    if string match -qr '(^|/)python[0-9.]*$' -- $program
        set -a program -m framework
        set -e words[1..2]
    end
    set -lx COMP_LINE "framework $words "(commandline -ct)
    $program -sc query=fish 2>/dev/null
end
function __framework_is_module
    set -l words (commandline -opc)
    test (count $words) -ge 3 -a "$words[2] $words[3]" = '-m framework'
end
complete -c framework -f -a '(__framework_completion)'
for program in python python3
    complete -c $program -n __framework_is_module -f -a '(__framework_completion)'
end
