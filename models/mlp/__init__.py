"""MLPs: one file each, found by listing this folder (and those of installed packages, io/plugins.py), with

    Options    a frozen dataclass, stored field by field in config.json and manifests; it has `module`
    an MLP     the module that `Options.module` makes

All of them are gated MLPs so far: _gated.py has the base class, with the norm before down_proj. A file needs nothing
but the names below.
"""

from ..graph import Graph, Value
from ..mixers import Place
from ._gated import GatedMLP, MLPOptions

__all__ = ["GatedMLP", "Graph", "MLPOptions", "Place", "Value", "swiglu"]
