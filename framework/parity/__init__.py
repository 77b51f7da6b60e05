"""Does training give the same weights on one process and on several, and if not, where do they depart first?

Three trainings of the same few steps are recorded by `recording.Recording`, a callback: with one process, again with
one process from weights that are moved by no more than rounding moves numbers, and with several. What the second does
to each number is how far rounding carries; `comparing` looks for what goes beyond it.
"""
