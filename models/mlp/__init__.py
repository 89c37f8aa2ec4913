"""MLPs: one file each, found by listing this folder, with

    Options    a frozen dataclass, stored field by field in config.json and manifests; it has `module`
    an MLP     the module that `Options.module` makes

All of them are gated MLPs so far: models/layers/mlp.py has the base class, with the norm before down_proj.
"""
