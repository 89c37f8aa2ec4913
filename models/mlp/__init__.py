"""MLPs: a file each, found by listing this folder, with

    Options    a frozen dataclass, which config.json and manifests hold field by field; it has `module`
    an MLP     the module that `Options.module` makes

models/layers/mlp.py has the gated MLP that all of them are so far, with the norm before down_proj.
"""
