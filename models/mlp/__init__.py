"""MLPs: one file each, found by listing this folder (and those of installed packages, io/plugins.py), with

    Options    a frozen dataclass, stored field by field in config.json and manifests; it has `module`
    an MLP     the module that `Options.module` makes

_gated.py has the base class of gated MLPs, with the norm before down_proj. A file needs nothing but the names below.
"""

from ..graph import Graph, Value
from ..mixers import Place
from ._gated import MLP, GatedMLP, MLPOptions

__all__ = ["MLP", "GatedMLP", "Graph", "MLPOptions", "Place", "Value", "swiglu"]
