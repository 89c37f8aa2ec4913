"""One page that shows what a model's attention does with a prompt, and what rounding does to it: `diffbit show`."""
