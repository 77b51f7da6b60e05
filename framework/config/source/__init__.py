"""What dotted names stand for, read from source files: nothing is imported, so it needs no torch.

An answer is certain or it is None. What Python decides while it runs is left to the ranks, which import the target:
decorators, metaclasses, `__getattr__` of a module, names bound in several places, compiled modules.

    modules     a module's file, and the names that its source binds
    lookup      `look_up`: from a dotted name to a class or function, through imports
    classes     bases, attributes and methods of a class
    signatures  the parameters of a function or class
"""

from framework.config.source.classes import constant, declared, defines, is_ordinary, lineage, methods
from framework.config.source.lookup import Found, Missing, SourceClass, SourceFunction, look_up, names_in
from framework.config.source.modules import SourceModule, files_unchanged
from framework.config.source.signatures import signature

__all__ = [
    "Found",
    "Missing",
    "SourceClass",
    "SourceFunction",
    "SourceModule",
    "constant",
    "declared",
    "defines",
    "files_unchanged",
    "is_ordinary",
    "lineage",
    "look_up",
    "methods",
    "names_in",
    "signature",
]
